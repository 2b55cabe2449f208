"""Texts of a machine at fault: disk, ports, devices, and the communication between them."""

from __future__ import annotations

import re

from objectives.measurement import FailureKind
from tuner.engine.failure_rules import Rank, Rule, any_of

HOST_DISK = (
    Rule(
        FailureKind.HOST_DISK,
        Rank.CAUSE,
        any_of(
            "no space left on device | disk quota exceeded | database or disk is full | disk is full | "
            "disk full | file system is full | filesystem is full | enospc | "
            "read-only file system | disk i/o error | input/output error | not enough space on the disk | "
            "not enough disk space | insufficient disk space | insufficient space in / | out of disk space | "
            "unable to write to disk | ephemeral-storage | ephemeral local storage usage exceeds | "
            "diskpressure | insufficient shared memory (shm) | might be out of shared memory | [errno 28] | "
            "[errno 30] | [errno 122] | (os error 28) | (os error 30) | (os error 122) | [errno 27] | (os error 27) | "
            "no usable temporary directory | workers are out of shared memory | "
            "unable to write to file </torch | pytorchstreamwriter failed writing"
        ),
    ),
    Rule(
        FailureKind.HOST_DISK,
        Rank.CAUSE,
        ("permission denied",),
        re.compile(r"permission denied:? .*(?:cache|tmp|/dev/shm|torchinductor|triton|\.lock)"),
    ),
)

PORT = (
    Rule(
        FailureKind.PORT_IN_USE,
        Rank.CAUSE,
        any_of(
            "address already in use | address in use | eaddrinuse | attempting to bind on address | "
            "only one usage of each socket address | failed to listen on any local network address | "
            "[errno 98] | [errno 48] | (os error 98) | errno: 98 | no free port | port conflict"
        ),
    ),
    Rule(
        FailureKind.PORT_IN_USE,
        Rank.CAUSE,
        any_of("bind failed | failed to bind | could not bind | cannot bind | unable to bind | can't bind"),
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

DEVICE_LOST = (
    Rule(
        FailureKind.DEVICE_LOST,
        Rank.CAUSE,
        any_of(
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
            "placement group of | don't have enough gpus available | libcuda.so | cuda is not available | "
            "torch not compiled with cuda enabled | driver not loaded | could not select device driver"
        ),
        re.compile(r"^(?!.*waiting for creating a placement group)(?!.*libcuda\.so(?!.{0,40}cannot open))"),
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
        any_of(
            "cuda error | cuda runtime error | cuda driver error | hip error | npu error | xpu error | "
            "cudnn error | cublas error | cublas_status_ | cudnn_status_ | cusparse_status_ | cudaerror | "
            "hiperror | acl error | acceleratorerror | nvrm: | nvmlerror"
        ),
        re.compile(r"^(?!.*(?:nccl|rccl|unhandled cuda|peer access|kernel image|stream is capturing))"),
    ),
)

COMMUNICATION = (
    Rule(
        FailureKind.COMMUNICATION,
        Rank.FABRIC,
        any_of(
            "unhandled system error | unhandled cuda error | ncclsystemerror | ncclinternalerror | "
            "ncclinvalidusage | ncclremoteerror | ncclunhandledcudaerror | ncclinvalidargument | nccl error | "
            "rccl error | hccl error | nccl operation failed | nccl operations have failed | "
            "nccl communicator was aborted | failed to initialize nccl | collective operation timeout | "
            "heartbeat monitor timed out | client socket has timed out | timeout at nccl work | "
            "distbackenderror | distnetworkerror | diststoreerror | rendezvoustimeouterror | "
            "rendezvousconnectionerror | rendezvousclosederror | rendezvous failed | one or more ranks timed out | "
            "connectfullmesh failed | gloo/transport | timed out initializing process group | "
            "cannot assign requested address | no route to host | network is unreachable | ibv_ | nvshmem | "
            "ucx  error | peer access is not supported | nixl_err | monitoredbarrier"
        ),
        re.compile(r"^(?!.*(?:nccl info|using nccl))"),
    ),
    Rule(
        FailureKind.COMMUNICATION,
        Rank.FABRIC,
        any_of(
            "nccl | rccl | gloo | hccl | oneccl | processgroup | tcpstore | init_process_group | all_reduce | "
            "all ranks | other ranks | allreduce | all_gather | allgather | collective | torch.distributed | "
            "c10d"
        ),
        re.compile(
            r"\b(?:nccl|rccl|hccl|oneccl|gloo|processgroup\w*|tcpstore|init_process_group|c10d|torch\.distributed|"
            r"collective|all_?reduce|all_?gather|broadcast|barrier)\b"
            r".{0,160}(?:timed? ?out(?!\s*[=:])|got stuck|failed|\berror|abort|mismatch)"
            r"|\b(?:timed? ?out(?!\s*[=:])|failed|error|waiting|stuck)\b.{0,120}\b(?:nccl|gloo|processgroup\w*|"
            r"tcpstore|process group|collective|all_?reduce|all_?gather|(?:all|other) ranks|"
            r"clients to (?:connect|join))\b"
        ),
    ),
    Rule(
        FailureKind.COMMUNICATION,
        Rank.ECHO,
        any_of(
            "connection closed by | connection reset by peer | closed by remote peer | connection refused | "
            "broken pipe | recvvalue failed | sendbytes failed | recvbytes failed | socket timeout | "
            "could not receive type from tcpstore"
        ),
        re.compile(r"^(?!.*\[errno \d)"),  # Python's own pipe errors: a process of the same host is gone
    ),
)
