"""vLLM's own validation in its helper process: the real vLLM, no engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner.config import EngineConfig
from tuner.engine import config_check
from tuner.engine.config_check import ConfigChecker, Refused, Resolved
from tuner.gate import effective_key

pytestmark = pytest.mark.end_to_end

MODEL = str(Path(__file__).parents[1] / "data" / "models" / "smollm2-135m")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConfigChecker]:
    made = ConfigChecker(tmp_path_factory.mktemp("check") / "check.log")
    yield made
    made.close()


def config(**args: Any) -> EngineConfig:
    fixed = {"model": MODEL, "skip_tokenizer_init": True, "max_model_len": 4096, "gpu_memory_utilization": 0.2}
    return EngineConfig({**fixed, **args}, {"HF_HUB_OFFLINE": "1"})


def resolved(answer: Resolved | Refused) -> dict[str, Any]:
    assert isinstance(answer, Resolved), answer
    return answer.effective_args


def test_defaults_are_filled_in_and_what_is_spelt_out_is_the_same_configuration(checker: ConfigChecker) -> None:
    left_out = config()
    defaults = resolved(checker.check(left_out))
    spelt_out = config(**{n: defaults[n] for n in ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")})

    assert defaults["max_num_seqs"] > 0
    assert defaults["max_model_len"] == 4096
    same = resolved(checker.check(spelt_out))
    assert effective_key(spelt_out, same) == effective_key(left_out, defaults)
    other = config(max_num_seqs=7)
    assert effective_key(other, resolved(checker.check(other))) != effective_key(left_out, defaults)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"dtype": "float7"}, "dtype"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 64}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 1.7}, "gpu_memory_utilization"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"tensor_parallel_size": 5}, "attention heads"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"max_num_seqs": "many"}, "TypeError: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_is_one_line_that_names_the_cause(checker: ConfigChecker, args: dict[str, Any], words: str) -> None:
    answer = checker.check(config(**args))

    assert isinstance(answer, Refused)
    assert words in answer.message
    assert answer.message.strip()
    assert len(answer.message.splitlines()) == 1
    assert "[type=" not in answer.message
    assert "validation error" not in answer.message
    assert "For further information" not in answer.message


def test_warm_helper_answers_at_once(checker: ConfigChecker) -> None:
    checker.check(config())
    began_s = time.monotonic()

    for seqs in (1, 2, 3, 4):
        checker.check(config(max_num_seqs=seqs))

    assert (time.monotonic() - began_s) / 4 < 0.5


def test_variables_of_one_configuration_do_not_reach_the_next(checker: ConfigChecker) -> None:
    broken = EngineConfig(config().args, {"VLLM_CPU_KVCACHE_SPACE": "nonsense"})

    first = checker.check(broken)

    assert isinstance(first, Refused)
    resolved(checker.check(config()))


def test_helper_that_was_killed_is_started_again_and_the_configuration_not_blamed(checker: ConfigChecker) -> None:
    checker.check(config())
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)

    resolved(checker.check(config()))


def test_helper_killed_in_the_middle_of_an_answer_is_asked_once_more(
    checker: ConfigChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(config())
    assert checker._process is not None
    first = checker._process.pid
    os.kill(first, signal.SIGSTOP)
    real = ConfigChecker._read_line

    def kill_first(self: ConfigChecker, limit_s: float) -> bytes | None:
        if self._process is not None and self._process.pid == first:
            os.kill(first, signal.SIGKILL)
        return real(self, limit_s)

    monkeypatch.setattr(ConfigChecker, "_read_line", kill_first)

    resolved(checker.check(config()))
    assert checker._process is not None
    assert checker._process.pid != first


def test_helper_that_does_not_answer_in_time_refuses_the_configuration(
    checker: ConfigChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(config())
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(config_check, "ANSWER_S", 0.3)

    assert checker.check(config()) == Refused("vLLM's validation of this configuration died or did not end")
    assert checker._process is None
