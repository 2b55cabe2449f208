"""The texts that name, or follow from, a failure: the table that `failures.classify` decides by.

Texts are those of vLLM 0.10 to 0.32, PyTorch, CUDA/HIP, NCCL, Hugging Face Hub, Ray and Linux. A rule is written for a
kind of failure, not for one line: literals, any of which must occur, and an expression where they are too wide.
"""

from __future__ import annotations

import re

from objectives.measurement import FailureKind, Stage
from tuner.engine.failure_rules import WATCHDOG_MARK, Rank, Rule


def _any(phrases: str) -> tuple[str, ...]:
    """Split literals that are separated by bars."""
    return tuple(phrase.strip() for phrase in phrases.split("|"))


_DEVICE = r"(?:cuda|hip|rocm|npu|xpu|mps|musa|mlu|hpu|gpu|tpu|device|hbm|vram|triton|sycl|level.zero)"
_EXCEPTION = r"(?:^|[\s:'\"(])(?:[a-z_][\w.]*\.)?"

HOST_DISK = (
    Rule(
        FailureKind.HOST_DISK,
        Rank.CAUSE,
        _any(
            "no space left on device | disk quota exceeded | database or disk is full | disk is full | "
            "disk full | file system is full | filesystem is full | enospc | "
            "read-only file system | disk i/o error | input/output error | not enough space on the disk | "
            "not enough disk space | insufficient disk space | insufficient space in / | out of disk space | "
            "unable to write to disk | ephemeral-storage | ephemeral local storage usage exceeds | "
            "diskpressure | insufficient shared memory (shm) | might be out of shared memory | [errno 28] | "
            "[errno 30] | [errno 122] | (os error 28) | (os error 30) | (os error 122)"
        ),
    ),
    Rule(
        FailureKind.HOST_DISK,
        Rank.CAUSE,
        ("permission denied",),
        re.compile(r"permission denied:? .*(?:cache|tmp|/dev/shm|torchinductor|triton|\.lock)"),
    ),
)

HOST_MEMORY = (
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.CAUSE,
        _any(
            "oomkilled | oom-kill | oom_kill | oom_reaper | oom-killer | node_out_of_memory | "
            "ray.exceptions.outofmemoryerror | node running low on memory | killed due to memory pressure | "
            "killed due to high memory usage | exceeds the memory usage threshold | ray killed this worker | "
            "memory cgroup out of memory | low on resource: memory | cpuallocator | cannot allocate memory | "
            "can't allocate memory | std::bad_alloc | bad_alloc | enomem | [errno 12] | (os error 12) | "
            "_arraymemoryerror | cudahostalloc failed | not enough host memory | insufficient host memory | "
            "not enough cpu memory | out of host memory | host out of memory | exceeded memory limit | "
            "memory limit exceeded | systemd-oomd | cpu out of memory"
        ),
    ),
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.CAUSE,
        ("out of memory: kill", "unable to allocate", "memoryerror"),
        re.compile(r"out of memory: kill|unable to allocate .{1,40} for an array|^memoryerror\b|[\s:(']memoryerror\b"),
    ),
    # Ray lists the memory killer as cause (1) of several that may be.
    Rule(
        FailureKind.HOST_MEMORY, Rank.CAUSE, ("oom killer",), re.compile(r"^(?!.*(?:\(1\)|by sigkill by)).*oom killer")
    ),
    # "137" is how shells and container runtimes write SIGKILL; there it is nearly always the memory killer.
    Rule(
        FailureKind.HOST_MEMORY,
        Rank.KILLED,
        ("killed", "137"),
        re.compile(
            r"^(?:.{0,200}\s\d+\s+)?killed(?:$|\s{2,}|\s+\()"
            r"|exit(?:ed with)?[ _-]?(?:code|status(?: code)?)[\":=\s(]*137\b"
        ),
    ),
)

PORT = (
    Rule(
        FailureKind.PORT_IN_USE,
        Rank.CAUSE,
        _any(
            "address already in use | address in use | eaddrinuse | attempting to bind on address | "
            "only one usage of each socket address | failed to listen on any local network address | "
            "[errno 98] | [errno 48] | (os error 98) | errno: 98 | no free port | port conflict"
        ),
    ),
    Rule(
        FailureKind.PORT_IN_USE,
        Rank.CAUSE,
        _any("bind failed | failed to bind | could not bind | cannot bind | unable to bind | can't bind"),
        re.compile(r"bind.{0,80}(?:address|port|socket|tcp|:\d{2,5}\b)|(?:address|port|socket|tcp).{0,80}bind"),
    ),
    Rule(
        FailureKind.PORT_IN_USE,
        Rank.CAUSE,
        ("port ", "port:", "port="),
        re.compile(
            r"\bport\b.{0,60}(?:already|currently|is) (?:in use|being used|used|taken|allocated|occupied|bound)"
        ),
    ),
)

MEMORY_NOT_FREE = (
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        _any(
            "less than desired gpu memory utilization | less than desired cpu memory utilization | "
            "less than desired memory utilization | less than the engine's budget | "
            "error in memory profiling | release gpu memory while vllm is profiling | "
            "another process is using the gpu | memory used by other processes"
        ),
        re.compile(r"^(?!.*on kv cache allocation)"),
    ),
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        ("free memory on device", "free memory on"),
        re.compile(r"free memory on (?:device|gpu|cuda|node).{0,120}(?:less than|insufficient|not enough)"),
    ),
    # vLLM's CPU backend: a positive share was left for the cache, and somebody else uses it.
    Rule(
        FailureKind.MEMORY_NOT_FREE,
        Rank.CAUSE,
        ("less than requested memory for kv",),
        re.compile(r"memory for kv \((?!-|0?\.?0+ ?/)[\d.]+/"),
        earliest=Stage.PROFILE,
    ),
)

KV_CACHE = (
    Rule(
        FailureKind.OOM_KV_CACHE,
        Rank.CAUSE,
        _any(
            "no available memory for the cache block | estimated maximum model length is | "
            "tokens that can be stored in kv cache | larger than the available kv cache memory | "
            "larger than available kv cache memory | exceeds available mamba cache blocks | "
            "less than requested memory for kv | cannot auto-fit max_model_len | "
            "to serve at least one request | to serve even a single token | kv cache is needed | "
            "kv cache is too small | not enough kv cache | insufficient kv cache | "
            "no memory left for kv cache | no memory for kv cache | num_gpu_blocks must be"
        ),
        earliest=Stage.KV_CACHE,
    ),
    Rule(
        FailureKind.OOM_KV_CACHE,
        Rank.CAUSE,
        _any("kv cache | kv-cache | kv_cache | cache blocks"),
        re.compile(
            r"(?:not enough|insufficient|no) (?:available |free |gpu |device )*(?:memory|space|blocks?)"
            r".{0,80}(?:kv.?cache|cache blocks)|(?:kv.?cache|cache blocks).{0,80}"
            r"(?:too small|not (?:large|big) enough|cannot (?:hold|fit)|insufficient|not enough|not fit)"
        ),
        earliest=Stage.KV_CACHE,
    ),
)

DEVICE_MEMORY = (
    Rule(
        None,
        Rank.CAUSE,
        ("out of memory occurred when warming up", "out of memory during warm"),
        earliest=Stage.PROFILE,
    ),
    Rule(
        None,
        Rank.CAUSE,
        _any(
            "outofmemoryerror | cuda_error_out_of_memory | cudaerrormemoryallocation | hiperroroutofmemory | "
            "hiperrormemoryallocation | status_alloc_failed | out_of_device_memory | resource_exhausted | "
            "not enough gpu memory | not enough device memory | insufficient gpu memory | "
            "insufficient device memory | out of gpu memory | out of device memory | tried to allocate | "
            "not enough memory | insufficient memory | insufficient_memory | pi_error_out_of_resources | "
            "ur_result_error_out_of_resources"
        ),
    ),
    Rule(
        None,
        Rank.CAUSE,
        ("out of memory", "out-of-memory", "outofmemory"),
        re.compile(
            rf"{_DEVICE}.{{0,80}}out.?of.?memory|out.?of.?memory.{{0,80}}{_DEVICE}"
            r"|(?:error|exception|failure|failed)\b.{0,60}out.?of.?memory|^out of memory\b"
        ),
    ),
    Rule(
        None,
        Rank.CAUSE,
        _any("failed to allocate | allocation failed | failed to alloc | unable to allocate"),
        re.compile(rf"alloc.{{0,80}}{_DEVICE}|{_DEVICE}.{{0,60}}alloc"),
    ),
)

MODEL = (
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        _any(
            "repository not found | repositorynotfounderror | revision not found | revisionnotfounderror | "
            "entry not found for url | entrynotfounderror | gatedrepoerror | gated repo | disabledrepoerror | "
            "access to model | awaiting a review from the repo authors | offlinemodeisenabled | "
            "incompletesnapshoterror | cannot find an appropriate cached snapshot | "
            "cannot find the requested files in the | couldn't connect to 'http | "
            "couldn't find them in the cached files | couldn't find it in the cached files | "
            "outgoing traffic has been disabled | not a valid model identifier | not a local folder | "
            "not a valid git identifier | not a valid repository name | "
            "invalid repository id or local directory | invalid username or password | invalid user token | "
            "hfvalidationerror | repo id must | does not appear to have | can't load the configuration of | "
            "can't load tokenizer | can't load the model | can't load image processor | "
            "couldn't instantiate the backend tokenizer | is not a valid json file | "
            "could not detect config format | no config file found | should have a `model_type` key | "
            "cannot find any model weights | weight files referenced in index but missing | "
            "missing weight files | no safetensors | no weight files found | "
            "error while deserializing header | headertoolarge | headertoosmall | invalidheader | "
            "metadataincompletebuffer | safetensorerror | safetensors_rust | safetensorsparsingerror | "
            "incomplete metadata | failed reading zip archive | unpicklingerror | "
            "consistency check failed: file should be of size | xetdownloaderror | cas service error | "
            "hfhubhttperror | git-lfs.github.com/spec | model not found | model does not exist | "
            "model path does not exist | failed to download the model | invalid model path"
        ),
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        _any("no such file or directory | filenotfounderror | permission denied | is a directory | not a directory"),
        re.compile(
            r"config\.json|params\.json|\.safetensors|\.gguf|\.bin\b|\.pth?\b|tokenizer|vocab\.|merges\.txt|/models?\b"
            r"|/snapshots/|models--|checkpoint|chat_template|huggingface"
        ),
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        _any("huggingface.co | hf.co | hf-mirror | modelscope | huggingface_hub"),
        re.compile(
            r"max retries|timed? ?out|connection ?error|failed to resolve|name resolution|refused|unreachable"
            r"|\b(?:401|403|404|416|429|5\d\d)\b|client error|server error|ssl|offline|not found|restricted|denied"
        ),
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        ("client error", "server error"),
        re.compile(r"\b(?:401|403|404|429|5\d\d) (?:client|server) error.{0,200}for url"),
    ),
)

DEVICE_LOST = (
    Rule(
        FailureKind.DEVICE_LOST,
        Rank.CAUSE,
        _any(
            "fallen off the bus | gpu is lost | gpu lost | device lost | device_lost | nvml_error | "
            "illegal memory access | illegal instruction was encountered | illegal address | "
            "device-side assert | unspecified launch failure | misaligned address | "
            "memory access fault by gpu | launch timed out and was terminated | uncorrectable ecc | "
            "ecc error | uncorrectable nvlink | no cuda-capable device | no cuda gpus are available | "
            "no hip gpus are available | no xpu devices are available | "
            "cuda-capable devices are busy or unavailable | cuda driver version is insufficient | "
            "cuda driver initialization failed | cuda initialization: | cuda unknown error | "
            "driver/library version mismatch | failed to initialize nvml | "
            "forward compatibility was attempted | system not yet initialized | invalid device ordinal | "
            "invalid device function | gpu has become unresponsive | failed to infer device type | "
            "no gpu available | has no gpu | gpu reset | gpu has been reset | device handle for gpu | "
            "nvidia-smi has failed | not able to use gpu | gpu hang | hw exception by gpu | "
            "cublas_status_execution_failed | cublas_status_internal_error | cublas_status_not_initialized | "
            "cudnn_status_execution_failed | cudnn_status_internal_error | placement group requiring | "
            "placement group of"
        ),
        re.compile(r"^(?!.*(?:waiting for creating a placement group))"),
    ),
    Rule(
        FailureKind.DEVICE_LOST,
        Rank.CAUSE,
        ("nvidia driver",),
        re.compile(r"no nvidia driver|nvidia driver.{0,60}(?:\bnot\b|fail|too old|insufficient|mismatch|lost)"),
    ),
    Rule(FailureKind.DEVICE_LOST, Rank.CAUSE, ("xid",), re.compile(r"\bxid\b.{0,60}\d")),
    # Whatever else the driver reports. Below the causes: "previous error during capture" follows another one.
    Rule(
        FailureKind.DEVICE_LOST,
        Rank.FABRIC,
        _any(
            "cuda error | cuda runtime error | cuda driver error | hip error | npu error | xpu error | "
            "cudnn error | cublas error | cublas_status_ | cudnn_status_ | cusparse_status_ | cudaerror | "
            "hiperror | acl error | acceleratorerror | nvrm:"
        ),
        re.compile(r"^(?!.*(?:nccl|rccl|unhandled cuda|peer access|kernel image|stream is capturing))"),
    ),
)

COMMUNICATION = (
    Rule(
        FailureKind.COMMUNICATION,
        Rank.FABRIC,
        _any(
            "unhandled system error | unhandled cuda error | ncclsystemerror | ncclinternalerror | "
            "ncclinvalidusage | ncclremoteerror | ncclunhandledcudaerror | ncclinvalidargument | nccl error | "
            "rccl error | hccl error | nccl operation failed | nccl operations have failed | "
            "nccl communicator was aborted | failed to initialize nccl | collective operation timeout | "
            "heartbeat monitor timed out | client socket has timed out | timeout at nccl work | "
            "dist.distbackenderror | distbackenderror | distnetworkerror | diststoreerror | rendezvous | "
            "connectfullmesh failed | gloo/transport | timed out initializing process group | "
            "cannot assign requested address | no route to host | network is unreachable | ibv_ | nvshmem | "
            "ucx  error | peer access is not supported | nixl_err"
        ),
        re.compile(r"^(?!.*(?:nccl info|using nccl))"),
    ),
    Rule(
        FailureKind.COMMUNICATION,
        Rank.FABRIC,
        _any(
            "nccl | rccl | gloo | hccl | oneccl | processgroup | tcpstore | init_process_group | all_reduce | "
            "all ranks | other ranks | allreduce | all_gather | allgather | collective | torch.distributed | "
            "c10d"
        ),
        re.compile(
            r"\b(?:nccl|rccl|hccl|oneccl|gloo|processgroup\w*|tcpstore|init_process_group|c10d|torch\.distributed|"
            r"collective|all_?reduce|all_?gather|broadcast|barrier)\b"
            r".{0,160}(?:timed? ?out(?!\s*[=:])|got stuck|failed|\berror|abort|mismatch)"
            r"|(?:timed? ?out(?!\s*[=:])|failed|error|waiting|stuck).{0,120}\b(?:nccl|gloo|processgroup\w*|tcpstore|"
            r"process group|collective|all_?reduce|all_?gather|(?:all|other) ranks|clients to (?:connect|join))\b"
        ),
    ),
    Rule(
        FailureKind.COMMUNICATION,
        Rank.ECHO,
        _any(
            "connection closed by | connection reset by peer | closed by remote peer | connection refused | "
            "broken pipe | recvvalue failed | sendbytes failed | recvbytes failed | socket timeout | "
            "could not receive type from tcpstore"
        ),
        re.compile(r"^(?!.*\[errno \d)"),  # Python's own pipe errors: a process of the same host is gone
    ),
)

_REFUSAL_WORDS = _any(
    "not supported | only supported | only support | does not support | doesn't support | "
    "do not support | unsupported | not implemented | incompatible | not compatible | must be | "
    "must equal | cannot be | can not be | can't be | should be | is required for | requires | "
    "are required | invalid value | is invalid | invalid | unknown | unrecognized | not a valid | "
    "not available | no valid | is not in | divisible by | exceeds | please install | not allowed | "
    "out of range | larger than | greater than | less than | smaller than | cannot use | can not use | "
    "not aligned | not permitted | at most one | does not exist or is not currently imported"
)
_REFUSAL = re.compile(
    r"(?:not|only) support(?:ed|s)?\b|do(?:es)?(?: not|n't) support|\bunsupported\b|\bincompatible\b"
    r"|not compatible|(?:must|should|can ?not|can't) (?:be|equal|have)\b|(?:is|are) required for"
    r"|\b(?:invalid|unknown|unrecognized|unsupported) [\w\- ]{0,40}"
    r"(?:argument|option|value|backend|method|dtype|type|format|size|mode|quant|config|model|parser|layout)"
    r"|\bno valid\b|not a valid\b|\brequires? (?:--|a |an |at |cuda|compute|gpu|sm|torch|python|the )"
    r"|not divisible by|(?:larger|greater|less|smaller) than|please install|not allowed|out of range"
    r"|\bexceeds\b|can ?not use\b|\bnot (?:aligned|permitted)\b|at most one|not currently imported"
)

CONFIG = (
    Rule(
        FailureKind.INVALID_CONFIG,
        Rank.CAUSE,
        _any(
            "unrecognized arguments | unrecognized argument | invalid choice | expected one argument | "
            "expected at least one argument | got an unexpected keyword argument | "
            "unexpected keyword argument | no such option | greater than or equal to max_num_seqs | "
            "is smaller than max_model_len | is smaller than max_num_seqs | "
            "greater than the derived max_model_len | greater than the derived max model len | "
            "larger than the maximum model length | divisible by tensor parallel size | "
            "divisible by pipeline parallel size | larger than the number of available gpus | "
            "larger than the available gpus | exceeds the number of available gpus | "
            "not supported in this architecture | concurrent partial prefill is not supported | "
            "no valid attention backend | no valid cudagraph | unsupported speculative method | "
            "unsupported sm version | unsupported gpu architecture | async scheduling is only supported with | "
            "is required for suffix decoding | only supported on gpus with compute capability | "
            "assert self.kv_cache_dtype in | unknown quantization method | "
            "quantization method specified in the model config | unknown dtype | model architectures | "
            "transformers does not recognize this architecture | "
            "failed to load the model config. if the model is a custom | contains custom code | "
            "`trust_remote_code=true` | no kernel image is available | "
            "not permitted when stream is capturing | out of resource: shared memory | "
            "out of resources: shared memory | ptxas fatal | ptxas error | mutually exclusive | "
            "too large swap space"
        ),
        re.compile(r"^(?!.*(?:resolved architecture|will be (?:ignored|removed)))"),
    ),
    Rule(
        FailureKind.INVALID_CONFIG,
        Rank.REFUSAL,
        _any(
            "validationerror | validation error for | value error, | assertion failed, | [type= | "
            "argument -- | argumenterror"
        ),
        re.compile(
            r"validationerror|validation errors? for|value error,|assertion failed,|\[type=\w+|argumenterror"
            r"|error: argument -"
        ),
        start_only=True,
    ),
    Rule(FailureKind.INVALID_CONFIG, Rank.REFUSAL, _REFUSAL_WORDS, _REFUSAL, start_only=True, as_error=True),
    # The same words in a line that nobody calls an error: they may as well be a warning of some library.
    Rule(FailureKind.INVALID_CONFIG, Rank.HINT, _REFUSAL_WORDS, _REFUSAL, start_only=True),
    # The exceptions that vLLM's checks raise. In the middle of a run the same types are defects, not refusals.
    Rule(
        FailureKind.INVALID_CONFIG,
        Rank.REFUSAL,
        _any("valueerror | assertionerror | notimplementederror | typeerror: | modulenotfounderror"),
        re.compile(
            rf"{_EXCEPTION}(?:valueerror|assertionerror|notimplementederror|modulenotfounderror)(?:$|:|\b(?=['\"]))"
            r"|typeerror: .*argument"
        ),
        start_only=True,
    ),
)

SILENCE = (
    Rule(
        FailureKind.HUNG,
        Rank.SILENCE,
        (
            WATCHDOG_MARK,
            *_any(
                "rpc call to | timed out waiting for engine | timed out waiting for new engine | "
                "timed out waiting for worker | timeout waiting for | did not receive response from front-end | "
                "failed to start within | did not start within | failed to become ready | not ready within | "
                "did not become ready | made no progress | engine is unresponsive | engine hung | "
                "execution timed out | execute_model timed out | sample_tokens timed out | request timed out | "
                "readtimeout | heartbeat timeout | blocked for more than | soft lockup | enginegeneratetimeout | "
                "raygettimeouterror | gettimeouterror | raychanneltimeouterror | rpc timeout"
            ),
        ),
        re.compile(r"^(?!.*rpc call to)|rpc call to .{0,80}(?:timed? ?out|timeout)"),
    ),
    Rule(
        FailureKind.HUNG,
        Rank.SILENCE,
        ("timeouterror", "timed out"),
        re.compile(
            rf"{_EXCEPTION}(?:asyncio\.)?timeouterror(?:$|:)|\b(?:engine|worker|executor|startup)\b.{{0,80}}timed out"
        ),
    ),
    # Of an orchestrator: it saw no progress and knows nothing of the reason.
    Rule(FailureKind.HUNG, Rank.DEATH, ("progressdeadlineexceeded", "exceeded its progress deadline")),
)

DEATH = (
    Rule(
        FailureKind.CRASHED,
        Rank.KILLED,
        _any(
            "segmentation fault | segfault | sigsegv | core dumped | bus error | sigabrt | "
            "fatal python error | stack smashing | double free | corrupted size | terminate called | sigill"
        ),
    ),
    Rule(
        FailureKind.CRASHED,
        Rank.DEATH,
        _any(
            "died unexpectedly | died with exit code | died, exit code | exit code: - | actordiederror | "
            "worker died | died or was killed | process has died | exited unexpectedly | "
            "terminated unexpectedly | failed core proc(s): {' | exit code 1"
        ),
    ),
    Rule(
        FailureKind.CRASHED,
        Rank.EXCEPTION,
        ("error", "exception"),
        re.compile(r"^(?:[a-z_][\w.]*\.)?[a-z_]\w*(?:error|exception)(?::|$)"),
    ),
)

RULES: tuple[Rule, ...] = (
    # The order decides between rules of one rank that match in the same line: the narrower reading first.
    *HOST_DISK,
    *HOST_MEMORY,
    *PORT,
    *MEMORY_NOT_FREE,
    *KV_CACHE,
    *DEVICE_MEMORY,
    *MODEL,
    *DEVICE_LOST,
    *COMMUNICATION,
    *CONFIG,
    *SILENCE,
    *DEATH,
)
