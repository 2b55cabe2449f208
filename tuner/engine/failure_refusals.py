"""Texts of a model that cannot be had, and of a configuration that vLLM or a kernel refuses."""

from __future__ import annotations

import re

from objectives.measurement import FailureKind
from tuner.engine.failure_rules import EXCEPTION, Rank, Rule, any_of

MODEL = (
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        any_of(
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
            "connection error when trying to load | did not match any variant of untagged enum | "
            "no supported config format found | error no file named | unable to load weights from | "
            "model path does not exist | failed to download the model | invalid model path"
        ),
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        any_of("no such file or directory | filenotfounderror | permission denied | is a directory | not a directory"),
        re.compile(
            r"config\.json|params\.json|\.safetensors|\.gguf|\.bin\b|\.pth?\b|tokenizer|vocab\.|merges\.txt|/models?\b"
            r"|/snapshots/|models--|checkpoint|chat_template|huggingface"
        ),
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        any_of("huggingface.co | hf.co | hf-mirror | modelscope | huggingface_hub"),
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
    Rule(
        FailureKind.MODEL_UNAVAILABLE, Rank.CAUSE, ("model",), re.compile(r"\bmodel:? [\w./\-]+ does(?: not|n't) exist")
    ),
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        any_of("tokenizer | gguf | s3 | gs:// | bucket"),
        re.compile(
            r"(?:unable to find|could not find|cannot find|can't find|failed to load|unable to load) the tokenizer"
            r"|failed to load tokenizer|tokenizer (?:file )?(?:was )?not found|\bgguf (?:file|model) not found"
            r"|\b(?:s3|gs|bucket)\b.{0,120}(?:access denied|forbidden|no such bucket|nosuchkey|not found)"
        ),
        start_only=True,
    ),
    # A client of a model's store: nothing else is asked over the network while an engine starts.
    Rule(
        FailureKind.MODEL_UNAVAILABLE,
        Rank.CAUSE,
        any_of("httpx. | httpcore. | requests.exceptions. | urllib3.exceptions. | botocore.exceptions. | modelscope."),
        re.compile(r"\b(?:httpx|httpcore|requests|urllib3|botocore|modelscope)\.[\w.]*(?:error|timeout|exception)\b"),
        start_only=True,
    ),
)

_REFUSAL_WORDS = any_of(
    "not supported | only supported | only support | does not support | doesn't support | "
    "do not support | unsupported | not implemented | incompatible | not compatible | must be | "
    "must equal | cannot be | can not be | can't be | should be | is required for | requires | "
    "are required | invalid value | is invalid | invalid | unknown | unrecognized | not a valid | "
    "not available | unavailable | not installed | was requested | no valid | "
    "is not in | divisible by | exceeds | please install | not allowed | "
    "out of range | larger than | greater than | less than | smaller than | cannot use | can not use | "
    "not aligned | not permitted | at most one | does not exist or is not currently imported"
)
_REFUSAL = re.compile(
    r"(?:not|only) support(?:ed|s)?\b|do(?:es)?(?: not|n't) support|\bunsupported\b|\bincompatible\b"
    r"|not compatible|(?:must|should|can ?not|can't) (?:be|equal|have)\b|(?:is|are) required for"
    r"|\b(?:invalid|unknown|unrecognized|unsupported) [\w\- ]{0,40}"
    r"(?:argument|option|value|backend|method|dtype|type|format|size|mode|quant|config|model|parser|layout)"
    r"|\bno valid\b|not a valid\b|\brequires? |was requested,? but"
    r"|(?:is|are) (?:not available|unavailable|not installed)"
    r"|not divisible by|(?:larger|greater|less|smaller) than|please install|not allowed|out of range"
    r"|\bexceeds\b|can ?not use\b|\bnot (?:aligned|permitted)\b|at most one|not currently imported"
)

CONFIG = (
    Rule(
        FailureKind.INVALID_CONFIG,
        Rank.CAUSE,
        any_of(
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
            "device kernel image is invalid | failed to find a kernel that can implement | "
            "not permitted when stream is capturing | out of resource: shared memory | "
            "out of resources: shared memory | ptxas fatal | ptxas error | mutually exclusive | "
            "too large swap space"
        ),
        re.compile(r"^(?!.*(?:resolved architecture|will be (?:ignored|removed)))"),
    ),
    Rule(
        FailureKind.INVALID_CONFIG,
        Rank.REFUSAL,
        any_of(
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
        any_of("valueerror | assertionerror | notimplementederror | typeerror: | modulenotfounderror"),
        re.compile(
            rf"{EXCEPTION}(?:valueerror|assertionerror|notimplementederror|modulenotfounderror)(?:$|:|\b(?=['\"]))"
            r"|typeerror: .*argument"
        ),
        start_only=True,
    ),
)
