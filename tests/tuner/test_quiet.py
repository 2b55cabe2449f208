from __future__ import annotations

from toy_study import Heard

from tuner.config import EngineConfig
from tuner.ledger import History, TrialRecord, TrialState
from tuner.quiet import Considerate


class Resting:
    """Remembers what it was last told."""

    now = False

    def __call__(self, *, now: bool) -> None:
        self.now = now


def record(number: int) -> TrialRecord:
    return TrialRecord(number, TrialState.COMPLETE, "design", {}, EngineConfig(), 0.0)


def test_rests_from_the_warm_up_to_the_end_of_the_measurement_and_not_while_engines_start() -> None:
    resting, heard = Resting(), Heard()
    considerate = Considerate(heard, resting)
    seen = []
    for text in ("start actor", "loading weights", "warm up", "probe speed", "run 3/24", "stop"):
        considerate.progressed(0, text)
        seen.append(resting.now)

    assert seen == [False, False, True, True, True, False]
    assert heard.stages == ["start actor", "loading weights", "warm up", "probe speed", "run 3/24", "stop"]


def test_rests_as_long_as_any_trial_is_measured() -> None:
    resting, heard = Resting(), Heard()
    considerate = Considerate(heard, resting)
    considerate.progressed(0, "run 1/24")
    considerate.progressed(1, "run 1/24")
    first, second = record(0), record(1)
    history = History(None, (first, second), (), ())

    considerate.finished(first, history)
    assert resting.now
    considerate.finished(second, history)

    assert not resting.now
    assert heard.records == [first, second]
