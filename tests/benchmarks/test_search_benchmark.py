"""What the figures of the search benchmark rest on: its clock, its noise, its gate, its measure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
from search_bench.play import Run, play
from search_bench.problem import (
    Changes,
    Knowledge,
    Truth,
    Values,
    corner_of,
    front_of,
    lognormal,
    measured,
    parameter,
    record,
)
from search_bench.results import curve, hours_to, infeasible_share, trials_to
from search_bench.searchers import Gated, Listed, Outcome, Suggestion
from search_bench.table import Table
from search_bench.table_snapshot import LOG_SPEEDS, SNAPSHOT, deviations, worth
from search_end import ended_after

from tuner.config import EngineConfig
from tuner.gate import Gate
from tuner.ledger import History
from tuner.memory_model import MemoryPrediction
from tuner.space import Space


class Toy:
    """A trade-off along one parameter; what is above 6 does not start, and the gate knows it."""

    name = "toy"
    title = "toy"
    space: ClassVar[Space] = {"max_num_seqs": parameter([1, 2, 3, 4, 5, 6, 7, 8])}
    default: ClassVar[Changes] = {"max_num_seqs": 3}
    version = "1"

    def noise(self, generator: np.random.Generator) -> Values:
        return lognormal(0.05, generator)

    def truth(self, changes: Changes) -> Truth:
        seqs = changes["max_num_seqs"]
        if seqs > 6:
            return Truth(None, 0.5, 10.0)
        return Truth((10.0 / seqs, 0.01 * seqs), -0.5, 100.0)

    def note(self, changes: Changes) -> None:
        pass

    def knowledge(self) -> Knowledge:
        return Knowledge(EngineConfig(), self._gate)

    def _gate(self, history: Callable[[], History]) -> Gate:
        def predict(config: EngineConfig) -> MemoryPrediction | None:
            short = 0.5 if config.args["max_num_seqs"] > 6 else -0.5
            return MemoryPrediction(
                1, 1, 0, 0, 0, 0, 1, 10, 15 if short > 0 else 5, 1, 10, short <= 0, short, (short, short), {},
                frozenset(), frozenset(), False,
            )  # fmt: skip

        return Gate(None, predict, longest_tokens=1, memory="refuse")

    def known_points(self) -> list[Values]:
        return [v for s in range(1, 7) if (v := self.truth({"max_num_seqs": s}).values) is not None]

    def corner(self) -> Values:
        return corner_of(self.known_points())


def run_of(values: list[list[float] | None]) -> Run:
    finished = [3600.0 * (i + 1) for i in range(len(values))]
    return Run("toy", "s", 0, 1, "v", values, finished, [0.0] * len(values), [""] * len(values), 0)


def listed(*seqs: int) -> Listed:
    return Listed(Toy(), 0, iter([{"max_num_seqs": s} for s in seqs]))


def test_whole_front_is_all_of_the_best_known() -> None:
    toy = Toy()
    shares = curve(run_of([list(v) for v in toy.known_points()]), toy)
    assert shares[-1] == pytest.approx(1.0)
    assert (shares[1:] >= shares[:-1]).all()


def test_what_does_not_start_adds_nothing() -> None:
    shares = curve(run_of([[2.5, 0.04], None, [5.0, 0.02]]), Toy())
    assert shares[0] == shares[1] < shares[2]


def test_front_holds_no_dominated_row() -> None:
    assert front_of([(2.0, 2.0), (1.0, 3.0), (2.0, 4.0), (3.0, 1.0)]) == [1, 0, 3]


def test_share_that_is_not_reached_takes_for_ever() -> None:
    run = run_of([None, [2.5, 0.04]])
    shares = curve(run, Toy())
    assert trials_to(shares, 0.01) == 2
    assert hours_to(run, shares, 0.01) == 2.0
    assert math.isinf(trials_to(shares, 0.99))


def test_noise_hangs_on_configuration_and_seed_alone() -> None:
    toy = Toy()
    changes = {"max_num_seqs": 4}
    first = measured(toy, toy.truth(changes), changes, 1)
    assert first == measured(toy, toy.truth(changes), dict(changes), 1)
    assert first != measured(toy, toy.truth(changes), changes, 2)


def test_noise_of_the_table_is_that_of_its_repeated_measurements() -> None:
    table = Table()
    drawn = np.log([table.noise(np.random.default_rng(seed)) for seed in range(500)])
    there = {tuple(row) for row in deviations(json.loads(SNAPSHOT.read_text())["measurements"], "seen_").round(9)}
    assert {tuple(row) for row in drawn.round(9)} <= there
    assert (drawn.std(axis=0) > 0.02).all()
    assert (drawn.std(axis=0) < 0.15).all()


def test_repeated_measurements_deviate_from_the_truth_by_more_than_from_their_mean() -> None:
    once = {"args": {"max_num_seqs": 1}, "again": False, "ttft_s": 1.0, "tpot_s": 0.01}
    again = {**once, "again": True, "ttft_s": math.exp(0.2), "tpot_s": 0.01}
    alone = {**once, "args": {"max_num_seqs": 2}}
    assert deviations([once, again, alone]) == pytest.approx(np.array([[-0.1 * 2**0.5, 0], [0.1 * 2**0.5, 0]]))


def test_what_a_slow_machine_measured_counts_for_what_it_usually_would_have() -> None:
    queueing = np.column_stack([2 * LOG_SPEEDS + 1, LOG_SPEEDS - 3])
    slow = np.array([2 * 0.05 + 1, 0.05 - 3]) + 0.01  # and a hundredth longer than the twin says
    assert worth(slow, 0.05, queueing, 0.03) == pytest.approx([1.01, -2.99], abs=2e-3)


def test_a_run_that_had_not_tipped_over_yet_is_not_counted_as_one_that_had() -> None:
    tips_at_0 = np.column_stack([LOG_SPEEDS, np.where(LOG_SPEEDS < 0, LOG_SPEEDS, LOG_SPEEDS + 0.8)])
    before, beyond = (worth(np.array([0.03, tpot]), 0.03, tips_at_0, 0.005)[1] for tpot in (0.03, 0.83))
    assert before == pytest.approx(0.0, abs=0.1)  # the twin alone would say that it was beyond and make it 0.8 less
    assert beyond == pytest.approx(0.4, abs=0.2)  # the mean of both: at the usual speed it tips over


def test_twin_of_the_table_learns_from_the_trials_of_the_run() -> None:
    table = Table()
    tried = [{**table.default, "max_num_batched_tokens": tokens} for tokens in (4096, 512, 64)]
    records = tuple(record(i, EngineConfig(), c, table.truth(c)) for i, c in enumerate(tried))
    knowledge = table.knowledge()
    assert knowledge.predictor is not None
    predict = knowledge.predictor(lambda: History(None, records, (), ()))
    others = [{**table.default, "max_num_batched_tokens": 128, "max_num_seqs": seqs} for seqs in (1, 2, 4, 8)]

    def off(basis: int) -> float:
        pairs = [(predict(c, basis), table.truth(c).values) for c in others]
        return float(np.mean([abs(math.log(p[0] / t[0])) for p, t in pairs if p and t]))

    assert off(3) < 0.05 < off(0)


def test_search_ends_after_three_choices_in_a_row_that_promise_too_little() -> None:
    promises = [None, (0.5, 0.1), (0.05, 0.1), (0.05, 0.1), None, (0.2, 0.1), *[(0.05, 0.1)] * 3, (0.001, 0.1)]
    assert ended_after(promises, "noise") == 9
    assert ended_after(promises, 0.1) == 9
    assert ended_after(promises, 0.01) is None


def test_actors_work_at_the_same_time() -> None:
    one = play(Toy(), "list", listed(1, 2, 4), version="v", seed=0, trials=4, actors=1)
    four = play(Toy(), "list", listed(1, 2, 4), version="v", seed=0, trials=4, actors=4)
    assert one.finished_s == [100.0, 200.0, 300.0, 400.0]
    assert four.finished_s == [100.0] * 4


def test_failed_start_costs_a_trial_without_the_gate_and_none_with_it() -> None:
    without = play(Toy(), "list", listed(8, 4), version="v", seed=0, trials=3, actors=1)
    gated = play(Toy(), "list", Gated(Toy(), listed(8, 4, 2)), version="v", seed=0, trials=3, actors=1)
    assert [v is None for v in without.values] == [False, True, False]
    assert [v is None for v in gated.values] == [False, False, False]
    assert gated.refused == 1
    assert infeasible_share([without]) == 0.0


def test_gate_in_front_tells_the_searcher_what_it_refused() -> None:
    told: list[Outcome] = []

    class Hears(Listed):
        def tell(self, suggestion: Suggestion, outcome: Outcome) -> None:
            told.append(outcome)

    gated = Gated(Toy(), Hears(Toy(), 0, iter([{"max_num_seqs": 8}, {"max_num_seqs": 2}])))
    assert [gated.ask().changes["max_num_seqs"] for _ in range(2)] == [3, 2]
    assert [o.values for o in told] == [None]
    assert told[0].violation > 0
