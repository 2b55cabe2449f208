from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectives.measurement import EngineFacts, Failure, FailureKind, Measurement, SpeedProbe, Stage
from objectives.score import Score, VoidReason
from tuner.config import EngineConfig
from tuner.engine.protocol import MeasurePlan, Progress
from tuner.errors import StudyStoppedError, UsageError
from tuner.ledger import Verification, VerifiedRun
from tuner.verify import DEFAULT_ROUNDS, Run, agreement, agreement_sentence, compare, plan_rounds, verify
from tuner.view import Objective
from tuner.workload.model import Request, Workload

TTFT, RATE = Objective("ttft_p95_s", "s"), Objective("output_tokens_per_s", "1/s", "maximize")
OBJECTIVES = (TTFT, Objective("tpot_p95_s", "s"))
REFERENCE, PICK = EngineConfig(), EngineConfig({"max_num_seqs": 4})
WORKLOAD = Workload("one", (Request(0.0, (1, 2), 2),), (0, 10), 0)
FACTS = EngineFacts("vllm", "0.32.0", "cpu", 1, "m", 1.0)

Behaviour = Callable[[EngineConfig, int], Mapping[str, float] | Failure]


@dataclass
class ScriptedEngine:
    """Answers each run by a script; the notes of the measurement carry the values to the score."""

    behaviour: Behaviour
    predicted: bool = False
    calls: list[tuple[EngineConfig, int]] = field(default_factory=list)

    def run(
        self, config: EngineConfig, workload: Workload, plan: MeasurePlan, progress: Progress
    ) -> Measurement | Failure:
        progress("start engine")
        self.calls.append((config, plan.salt))
        outcome = self.behaviour(config, len(self.calls) - 1)
        if isinstance(outcome, Failure):
            return outcome
        return Measurement(FACTS, "f", (), (), (), (1.0,), predicted=self.predicted, notes=outcome)

    def close(self) -> None:
        pass


def score(measurement: Measurement) -> Score:
    values = dict(measurement.notes)
    void = (VoidReason("client_late", "late"),) if values.pop("void", 0) else ()
    return Score(values, {}, {"memory": -0.1}, void)


def run_verify(
    behaviour: Behaviour, rounds: int = 3, **options: object
) -> tuple[Verification | Failure, ScriptedEngine]:
    engine = ScriptedEngine(behaviour, predicted=bool(options.pop("predicted", False)))
    found = verify(
        engine,
        REFERENCE,
        PICK,
        WORKLOAD,
        MeasurePlan(),
        number=7,
        rounds=rounds,
        objectives=OBJECTIVES,
        score=score,
        progress=lambda _: None,
        **options,  # type: ignore[arg-type]  # keyword arguments of verify
    )
    return found, engine


def ran(run: Run, **values: float) -> VerifiedRun:
    return VerifiedRun(run.round, run.side, values)


def steady(config: EngineConfig, call: int) -> dict[str, float]:
    factor = 0.7 if config == PICK else 1.0
    wobble = 1.0 + 0.004 * (-1) ** (call // 3)
    return {"ttft_p95_s": 2.0 * factor * wobble, "tpot_p95_s": 0.05 * wobble}


@given(st.integers(2, 30), st.integers())
def test_the_sides_alternate_and_share_fresh_seeds_within_a_round(rounds: int, seed: int) -> None:
    runs = plan_rounds(rounds, seed)

    sides = [run.side for run in runs]
    assert sides[:4] == ["default", "pick", "pick", "default"]
    assert Counter(sides) == {"default": rounds, "pick": rounds}
    assert len({run.salt for run in runs}) == rounds
    assert all(run.salt % 2 == 0 and 0 <= run.salt < 2**31 for run in runs)


def test_one_round_is_too_few() -> None:
    with pytest.raises(UsageError, match="--rounds 1"):
        plan_rounds(1, 0)


def test_an_improvement_is_found_and_the_other_objective_left_alone() -> None:
    found, engine = run_verify(steady)

    assert isinstance(found, Verification)
    assert found.verdict == {"ttft_p95_s": "better", "tpot_p95_s": "no difference"}
    assert found.change["ttft_p95_s"] == pytest.approx(-0.3, abs=0.01)
    assert found.interval["ttft_p95_s"][0] < -0.3 < found.interval["ttft_p95_s"][1]
    assert [config for config, _ in engine.calls] == [REFERENCE, PICK, PICK, REFERENCE, REFERENCE, PICK]
    assert (found.number, found.rounds, found.over_http) == (7, 3, False)


def test_more_is_better_where_the_objective_says_so() -> None:
    runs = [ran(run, output_tokens_per_s=130.0 if run.side == "pick" else 100.0) for run in plan_rounds(3, 0)]

    assert compare(runs, [RATE])["output_tokens_per_s"].verdict == "better"


def test_a_change_that_nobody_would_deploy_for_is_no_difference() -> None:
    runs = [ran(run, ttft_p95_s=0.995 if run.side == "pick" else 1.0) for run in plan_rounds(3, 0)]

    compared = compare(runs, [TTFT])["ttft_p95_s"]

    assert compared.verdict == "no difference"
    assert compared.interval == pytest.approx((-0.005, -0.005))


def test_a_machine_that_slows_down_evenly_changes_nothing() -> None:
    runs = [ran(run, ttft_p95_s=1.1**i) for i, run in enumerate(plan_rounds(4, 0))]

    assert compare(runs, [TTFT])["ttft_p95_s"].change == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=8), st.floats(0.01, 100))
def test_the_change_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    runs = plan_rounds(4, 0)
    plain = compare([ran(r, ttft_p95_s=v) for r, v in zip(runs, values, strict=True)], [TTFT])
    scaled = compare([ran(r, ttft_p95_s=v * unit) for r, v in zip(runs, values, strict=True)], [TTFT])

    assert scaled["ttft_p95_s"].change == pytest.approx(plain["ttft_p95_s"].change, rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(0.1, 10), min_size=8, max_size=8))
def test_the_interval_holds_the_change_and_the_verdict_keeps_to_it(values: list[float]) -> None:
    runs = plan_rounds(4, 0)
    compared = compare([ran(r, ttft_p95_s=v) for r, v in zip(runs, values, strict=True)], [TTFT])["ttft_p95_s"]
    low, high = compared.interval

    assert low <= compared.change <= high
    assert compared.verdict == ("better" if high < -0.01 else "worse" if low > 0.01 else "no difference")


def test_the_fit_is_that_of_numpys_least_squares() -> None:
    draw = random.Random(0)
    runs = [ran(run, ttft_p95_s=draw.uniform(1, 2)) for run in plan_rounds(5, 0)]
    design = [[run.side == "pick", 1.0, i] for i, run in enumerate(runs)]
    logs = [math.log(run.values["ttft_p95_s"]) for run in runs]

    expected = np.linalg.lstsq(np.array(design, dtype=float), np.array(logs), rcond=None)[0][0]

    assert compare(runs, [TTFT])["ttft_p95_s"].change == pytest.approx(math.expm1(expected))


def test_noise_alone_is_seldom_taken_for_a_difference_and_15_percent_is_found() -> None:
    """At 5% noise a run and the default number of rounds; the benchmark has the figures at length."""
    draw = np.random.default_rng(1)

    def noisy(factor: float) -> dict[str, float]:
        return {o.name: factor * math.exp(draw.normal(0, 0.05)) for o in OBJECTIVES}

    def verdicts(factor: float, repetitions: int = 400) -> list[tuple[str, ...]]:
        found = []
        for _ in range(repetitions):
            rows = [ran(run, **noisy(factor if run.side == "pick" else 1.0)) for run in plan_rounds(DEFAULT_ROUNDS, 0)]
            found.append(tuple(c.verdict for c in compare(rows, OBJECTIVES).values()))
        return found

    same, improved = verdicts(1.0), verdicts(0.85)

    assert sum(set(v) == {"no difference"} for v in same) / len(same) >= 0.95
    assert sum(v[0] == "better" for v in improved) / len(improved) >= 0.9


def test_a_void_run_is_tried_again_with_other_seeds() -> None:
    void_once = lambda config, call: {**steady(config, call), "void": float(call == 1)}  # noqa: E731

    found, engine = run_verify(void_once)

    assert isinstance(found, Verification)
    assert len(engine.calls) == 7
    assert engine.calls[2][1] == engine.calls[1][1] + 1


def test_a_run_that_stays_void_is_left_out() -> None:
    void_twice = lambda config, call: {**steady(config, call), "void": float(call in (1, 2))}  # noqa: E731

    found, _ = run_verify(void_twice)

    assert isinstance(found, Verification)
    assert [run.side for run in found.runs] == ["default", "pick", "default", "default", "pick"]


def test_nothing_but_void_runs_is_no_verification() -> None:
    with pytest.raises(StudyStoppedError, match="only 0 of 6 runs count"):
        run_verify(lambda config, call: {**steady(config, call), "void": 1.0})


def test_the_configurations_own_failure_ends_it_at_once() -> None:
    oom = Failure(FailureKind.OOM_RUNTIME, Stage.RUN, "out of memory")

    found, engine = run_verify(lambda config, call: oom if config == PICK else steady(config, call))

    assert found == oom
    assert len(engine.calls) == 2


def test_the_machines_failure_is_forgiven_once() -> None:
    hung = Failure(FailureKind.HUNG, Stage.RUN, "hung")

    once, engine = run_verify(lambda config, call: hung if call == 0 else steady(config, call))
    always, _ = run_verify(lambda config, call: hung)

    assert isinstance(once, Verification)
    assert len(engine.calls) == 7
    assert always == hung


def test_the_twin_cannot_verify() -> None:
    with pytest.raises(UsageError, match="the twin predicts"):
        run_verify(steady, predicted=True)


def test_an_objective_that_is_undefined_in_too_many_runs_is_absent() -> None:
    def single_tokens(config: EngineConfig, call: int) -> dict[str, float]:
        return {"ttft_p95_s": steady(config, call)["ttft_p95_s"]}

    found, _ = run_verify(single_tokens)

    assert isinstance(found, Verification)
    assert set(found.change) == set(found.interval) == set(found.verdict) == {"ttft_p95_s"}


def served(ttft_s: float, tpot_s: float, probe: SpeedProbe | None = None) -> VerifiedRun:
    return VerifiedRun(0, "pick", {"ttft_p95_s": ttft_s, "tpot_p95_s": tpot_s}, probe)


def test_served_figures_agree_within_the_studys_noise() -> None:
    runs = [served(1.04, 0.07), VerifiedRun(0, "default", {"ttft_p95_s": 9.0}), served(1.06, 0.07)]

    ttft, tpot = agreement(
        runs, {"ttft_p95_s": 1.0, "tpot_p95_s": 0.05}, None, {"ttft_p95_s": 0.1, "tpot_p95_s": 0.1}, OBJECTIVES
    )

    assert ttft.within_noise
    assert "within the noise of 10.0%" in agreement_sentence(ttft)
    assert not tpot.within_noise
    assert tpot.change == pytest.approx(0.4)
    assert "detokeniser" in agreement_sentence(tpot)
    assert "a machine that changed since the study" in agreement_sentence(tpot)


def test_a_difference_is_explained_by_the_speed_that_the_probe_saw() -> None:
    runs = [served(1.3, 0.05, SpeedProbe(0.6, 0.03))] * 2

    ttft, _ = agreement(
        runs,
        {"ttft_p95_s": 1.0, "tpot_p95_s": 0.05},
        SpeedProbe(0.5, 0.025),
        {"ttft_p95_s": 0.1, "tpot_p95_s": 0.1},
        OBJECTIVES,
    )

    assert ttft.speed_index == pytest.approx(1.2)
    assert ttft.corrected == pytest.approx(1.3 / 1.2 - 1)
    sentence = agreement_sentence(ttft)
    assert "beyond the noise of 10.0%" in sentence
    assert sentence.endswith("1.20 times as long as in the study; at one speed it is +8.3%, within that noise")
