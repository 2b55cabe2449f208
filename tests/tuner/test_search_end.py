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


def test_study_ends_when_the_next_trials_promise_less_than_noise_alone_does(tmp_path: Path) -> None:
    study = ToyStudy.at(tmp_path, search={"startup_trials": 3, "stop_when_gain_below": "noise"})

    ending = study.run(ToyEngine(), trials=50)

    assert ending.code == "converged"
    assert "noise" in study.history.notes[-1].text
    assert len(study.trials) < len(SEQS) * len(CHUNKS)


def test_what_an_operator_asks_for_is_tried_though_the_search_has_converged(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, search={"startup_trials": 3, "stop_when_gain_below": 0.99})
    assert study.run(ToyEngine(), trials=50).code == "converged"
    tried = {(t.params["max_num_seqs"], t.params["max_num_batched_tokens"]) for t in study.trials}
    seqs, chunk = next(cell for cell in itertools.product(SEQS, CHUNKS) if cell not in tried)

    study.proposer().enqueue("operator", {"max_num_seqs": seqs, "max_num_batched_tokens": chunk})
    ending = study.run(ToyEngine(), trials=50)

    assert study.trials[-1].source == "operator"
    assert study.trials[-1].params == {"max_num_seqs": seqs, "max_num_batched_tokens": chunk}
    assert ending.code == "converged"


def test_front_is_measured_again_before_what_the_budget_has_no_room_for(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, confirm={"rounds": 2})
    for seqs in (1, 16):
        study.proposer().enqueue("recipe:some", {"max_num_seqs": seqs, "max_num_batched_tokens": 64})

    study.run(ToyEngine(), trials=1)

    assert [(t.source, t.repeats) for t in study.trials] == [("reference", None), ("confirm", 0), ("confirm", 0)]
    assert len(study.proposer().queued("recipe:some")) == 2
