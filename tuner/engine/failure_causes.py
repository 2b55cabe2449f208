"""The table that `failures.classify` decides by: every family of texts that names, or follows from, a failure.

Texts are those of vLLM 0.10 to 0.32, PyTorch, CUDA/HIP, NCCL, Hugging Face Hub, Ray and Linux. A rule is written for a
kind of failure, not for one line: literals, any of which must occur, and an expression where they are too wide.
"""

from __future__ import annotations

import re

from objectives.measurement import FailureKind
from tuner.engine.failure_machine import COMMUNICATION, DEVICE_LOST, HOST_DISK, PORT
from tuner.engine.failure_memory import DEVICE_MEMORY, HOST_MEMORY, KV_CACHE, MEMORY_NOT_FREE
from tuner.engine.failure_refusals import CONFIG, MODEL
from tuner.engine.failure_rules import EXCEPTION, WATCHDOG_MARK, Rank, Rule, any_of

SILENCE = (
    Rule(
        FailureKind.HUNG,
        Rank.SILENCE,
        (
            WATCHDOG_MARK,
            *any_of(
                "rpc call to | timed out waiting for engine | timed out waiting for new engine | "
                "timed out waiting for worker | timeout waiting for | did not receive response from front-end | "
                "failed to start within | did not start within | failed to become ready | not ready within | "
                "did not become ready | made no progress | engine is unresponsive | engine hung | "
                "execution timed out | execute_model timed out | sample_tokens timed out | request timed out | "
                "readtimeout | heartbeat timeout | blocked for more than | soft lockup | enginegeneratetimeout | "
                "raygettimeouterror | gettimeouterror | raychanneltimeouterror | rpc timeout | "
                "timed out waiting for the condition | context deadline exceeded | did not become healthy | "
                "failed to start in time | zmq.error.again"
            ),
        ),
        re.compile(r"^(?!.*rpc call to)|rpc call to .{0,80}(?:timed? ?out|timeout)"),
    ),
    Rule(
        FailureKind.HUNG,
        Rank.SILENCE,
        ("timeouterror", "timed out"),
        re.compile(
            rf"{EXCEPTION}(?:asyncio\.)?timeouterror(?:$|:)|\b(?:engine|worker|executor|startup)\b.{{0,80}}timed out"
        ),
    ),
    # Of an orchestrator: it saw no progress and knows nothing of the reason.
    Rule(FailureKind.HUNG, Rank.DEATH, ("progressdeadlineexceeded", "exceeded its progress deadline")),
)

DEATH = (
    Rule(
        FailureKind.CRASHED,
        Rank.KILLED,
        any_of(
            "segmentation fault | segfault | sigsegv | core dumped | bus error | sigabrt | "
            "fatal python error | stack smashing | double free | corrupted size | terminate called | sigill"
        ),
    ),
    Rule(
        FailureKind.CRASHED,
        Rank.DEATH,
        any_of(
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
