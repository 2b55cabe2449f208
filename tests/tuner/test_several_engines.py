from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_study import BUSY, REQUESTS, Outcome, Script, ToyEngine, ToyStudy, measured, oom_beyond, served, times

from objectives.measurement import Failure, FailureKind, Stage
from tuner import study as loop
from tuner.config import EngineConfig
from tuner.drift import INTERFERENCE
from tuner.engine.protocol import Seat
from tuner.errors import StudyStoppedError
from tuner.ledger import TrialRecord, TrialState
from tuner.view import view

LOST = Failure(FailureKind.NODE_LOST, Stage.RUN, "10.0.0.2 left the cluster")
SEVERAL = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class ToyPool:
    """An `EnginePool` whose seats a test changes while a study runs."""

    now: list[Seat] = field(default_factory=list)
    closed: bool = False

    def seats(self) -> Sequence[Seat]:
        return list(self.now)

    def close(self) -> None:
        self.closed = True


def machines(*engines: ToyEngine, of: int = 1) -> ToyPool:
    """A pool with `of` engines on each machine."""
    return ToyPool([Seat(engine, f"machine-{i // of}") for i, engine in enumerate(engines)])


def lasting(pauses_s: Sequence[float], script: Script = oom_beyond) -> ToyEngine:
    """An engine whose trials last so long, one after the other and over again."""

    def run(config: EngineConfig, call: int) -> Outcome:
        time.sleep(pauses_s[call % len(pauses_s)])
        return script(config, call)

    return ToyEngine(run)


def own(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [t for t in trials if t.engine_s > 0 and t.repeats is None and t.source != "reference"]


PAUSES = st.lists(st.sampled_from([0.0, 0.002, 0.01, 0.03]), min_size=1, max_size=4)


@SEVERAL
@given(st.lists(PAUSES, min_size=2, max_size=4))
def test_whatever_the_order_in_which_trials_end_none_is_lost_and_none_runs_twice(
    tmp_path_factory: pytest.TempPathFactory, pauses: list[list[float]]
) -> None:
    study = ToyStudy.in_memory(tmp_path_factory.mktemp("study"))
    engines = [lasting(p) for p in pauses]

    ending = study.run(machines(*engines), trials=8)

    assert ending.code == "budget"
    ran = [config.key() for engine in engines for config, _ in engine.runs]
    assert len(ran) == len(set(ran)) == 8
    assert all(t.state in (TrialState.COMPLETE, TrialState.INFEASIBLE) for t in study.trials)
    assert {state for state, _ in study.told().values()} == {"COMPLETE"}
    assert sorted(r.number for r in study.heard.records) == [t.number for t in study.trials]


@SEVERAL
@given(PAUSES, st.integers(1, 5))
def test_interrupted_trials_keep_their_numbers_and_are_run_again(
    tmp_path_factory: pytest.TempPathFactory, pauses: list[float], at: int
) -> None:
    study = ToyStudy.in_memory(tmp_path_factory.mktemp("study"))
    calls = itertools.count()

    def until_interrupted(config: EngineConfig, call: int) -> Outcome:
        return KeyboardInterrupt() if next(calls) == at else oom_beyond(config, call)

    with pytest.raises(KeyboardInterrupt):
        study.run(machines(*(lasting(p, until_interrupted) for p in (pauses, [0.02], [0.05]))), trials=9)
    left = {p.number for p in study.proposer().open_trials()}
    noted = {t.number for t in study.trials if t.failure is not None and t.failure.kind is FailureKind.INTERRUPTED}

    study.run(machines(lasting(pauses), lasting([0.0])), trials=9)

    assert noted <= left
    assert len(own(study.trials)) == 8
    assert {t.number for t in study.trials} >= noted  # what was asked for and not begun may turn out to be known
    assert study.proposer().open_trials() == []
    assert all(n == 1 for n in Counter(t.config.key() for t in own(study.trials)).values())
    assert "RUNNING" not in {state for state, _ in study.told().values()}


def test_nothing_runs_beside_the_reference(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    other = ToyEngine()
    beside_reference: list[int] = []

    def first(config: EngineConfig, call: int) -> Outcome:
        if call == 0:
            time.sleep(0.05)
            beside_reference.append(len(other.runs))
        return measured(config)

    study.run(machines(ToyEngine(first), other), trials=6)

    assert beside_reference == [0]
    assert other.runs


def test_machine_that_leaves_takes_only_its_running_trial_which_is_run_elsewhere(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    pool = ToyPool()

    def leave(config: EngineConfig, call: int) -> Outcome:
        pool.now = [seat for seat in pool.now if seat.engine is not leaving]
        return LOST

    leaving, staying = ToyEngine(leave), lasting([0.02])
    pool.now = [Seat(staying, "stays"), Seat(leaving, "leaves")]

    ending = study.run(pool, trials=6)

    assert ending.code == "budget"
    lost = [t for t in study.trials if any(a.failure == LOST for a in t.attempts)]
    assert len(leaving.runs) == len(lost) == 1
    assert lost[0].state in (TrialState.COMPLETE, TrialState.INFEASIBLE)
    assert len(own(study.trials)) == 5
    assert [n.code for n in study.history.notes] == ["node_lost", "budget"]


def test_trial_under_which_machine_after_machine_leaves_is_given_up(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    fatal: list[str] = []

    def script(config: EngineConfig, call: int) -> Outcome:
        if not config.args.get("max_num_seqs"):
            return measured(config)
        fatal.append(config.key())
        return LOST if config.key() == fatal[0] else measured(config)

    study.run(machines(ToyEngine(script)), trials=4)

    given_up = [t for t in study.trials if t.failure == LOST]
    assert len(given_up) == 1
    assert fatal.count(fatal[0]) == 3
    assert study.told()[given_up[0].number] == ("FAIL", None)


def test_machine_that_joins_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    study = ToyStudy.in_memory(tmp_path)
    joined, pool = ToyEngine(), ToyPool()

    def join(config: EngineConfig, call: int) -> Outcome:
        if call == 3:
            pool.now = [*pool.now, Seat(joined, "new")]
            time.sleep(0.1)
        return measured(config)

    pool.now = [Seat(ToyEngine(join), "old")]

    study.run(pool, trials=8)

    assert joined.runs


def test_study_waits_for_a_machine_and_gives_up_when_none_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.01)
    monkeypatch.setattr(loop, "NO_ENGINE_S", 0.05)
    with pytest.raises(StudyStoppedError, match="no machine with room for an engine"):
        ToyStudy.in_memory(tmp_path).run(ToyPool(), trials=8)


def test_engine_whose_machine_fails_again_and_again_is_left_out_and_the_study_goes_on(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    broken = ToyEngine(lambda config, call: BUSY)
    good = lasting([0.01], lambda config, _: measured(config))

    ending = study.run(ToyPool([Seat(good, "good"), Seat(broken, "bad")]), trials=8)

    assert ending.code == "budget"
    assert len(broken.runs) == 3
    assert any(note.code == "engine" and "bad" in note.text for note in study.history.notes)
    assert all(t.state is TrialState.COMPLETE for t in study.trials)


def test_failures_on_three_engines_without_a_success_stop_the_study(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    study.run(ToyEngine(), trials=1)
    with pytest.raises(StudyStoppedError, match="the machine failed 3 times in a row"):
        study.run(machines(*(ToyEngine(lambda config, call: BUSY) for _ in range(5))), trials=8)


def test_configuration_that_runs_already_is_not_started_beside_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REFUSALS_IN_A_ROW", 25)
    space = {"max_num_seqs": [1, 4], "max_num_batched_tokens": [64, 256]}
    study = ToyStudy.in_memory(tmp_path, space=space)
    engines = [lasting([0.01]) for _ in range(4)]

    ending = study.run(machines(*engines), trials=50)

    assert ending.code == "exhausted"
    ran = [config.key() for engine in engines for config, _ in engine.runs]
    assert len(ran) == len(set(ran))
    assert "RUNNING" not in {state for state, _ in study.told().values()}


# Engines on one machine -----------------------------------------------------------------------------------------------


class Neighbours:
    """Two engines on one machine that take twice as long when the other is busy at any time meanwhile."""

    def __init__(self, *, disturb: bool) -> None:
        self._disturb = disturb
        self._active: list[list[bool]] = []
        self._changed = threading.Condition()
        self.engines = [ToyEngine(self._run), ToyEngine(self._run)]

    def _run(self, config: EngineConfig, call: int) -> Outcome:
        disturbed = [False]
        with self._changed:
            self._active.append(disturbed)
            if len(self._active) == 2:
                for one in self._active:
                    one[0] = True
                self._changed.notify_all()
            if call == 2:  # the measurement that is to be beside a busy neighbour lasts until there is one
                self._changed.wait_for(lambda: disturbed[0], timeout=5)
        time.sleep(0.01)
        with self._changed:
            self._active.remove(disturbed)
        if not (self._disturb and disturbed[0]):
            return measured(config)
        ttft_s, tpot_s = times(config)
        return measured(config, requests=tuple(served(i, 2 * ttft_s, 2 * tpot_s) for i in range(REQUESTS)))


def test_engines_that_disturb_each_other_are_noticed_and_the_front_is_measured_alone(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, noise={"aa_runs": 1, "sentinel_every": 0})
    pool = machines(*Neighbours(disturb=True).engines, of=2)

    study.run(pool, trials=6)

    sources = [t.source for t in study.trials]
    assert sources[:3] == ["reference", "sentinel", "sentinel"]
    assert [t.neighbours for t in study.trials[:3]] == [0, 0, 1]
    assert [n.code for n in study.history.notes if n.code in (INTERFERENCE, "drift")] == [INTERFERENCE]
    everything = view(study.history, study.file_objectives)
    alone = {t.config.key() for t in study.trials if t.neighbours == 0}
    assert {everything.trial(n).config.key() for n in everything.front} <= alone


def test_engines_that_leave_each_other_alone_cost_one_measurement_more(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, noise={"aa_runs": 1, "sentinel_every": 0})

    study.run(machines(*Neighbours(disturb=False).engines, of=2), trials=6)

    sources = [t.source for t in study.trials]
    assert (sources.count("sentinel"), sources.count("alone")) == (2, 0)
    assert not [n for n in study.history.notes if n.code == INTERFERENCE]
