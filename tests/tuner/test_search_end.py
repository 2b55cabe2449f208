from __future__ import annotations

import itertools
from pathlib import Path

from toy_study import CHUNKS, SEQS, ToyEngine, ToyStudy


def test_small_space_is_tried_to_its_end_each_configuration_once(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"startup_trials": 3})

    ending = study.run(ToyEngine(), trials=50)

    assert ending.code == "exhausted"
    ran = [(t.params["max_num_seqs"], t.params["max_num_batched_tokens"]) for t in study.trials if t.engine_s > 0]
    assert len(ran) == len(set(ran))
    assert set(ran) >= set(itertools.product(SEQS, CHUNKS)) - {(4, 1024)}, "all but the reference, known already"


def test_study_ends_when_the_next_trials_promise_less_than_it_asks(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"startup_trials": 3, "stop_when_gain_below": 0.99})

    ending = study.run(ToyEngine(), trials=50)

    assert ending.code == "converged"
    assert 6 <= len(study.trials) < len(SEQS) * len(CHUNKS)
    assert [t.source for t in study.trials[-3:]] == ["sampler"] * 3
    assert study.history.notes[-1].code == "converged"
