from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from toy_study import SPEC, ToyEngine, ToyStudy

from tuner.errors import StudyFileError, UsageError
from tuner.injection import inject
from tuner.ledger import StudyHeader
from tuner.study_folder import StudyFolder

TWIN = {"engine": {"backend": "twin", "device": "a6000"}}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyStudy:
    """A study of which the reference was measured."""
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump({**SPEC, **TWIN}))
    toy = ToyStudy(StudyFolder.of("toy"), TWIN)
    toy.folder.prepare()
    header = StudyHeader("toy", toy.file.spec.identity(), "0", "toy", "0.32.0", "0.1.0", time.time())
    toy.folder.ledger.append(header)
    toy.proposer().enqueue("reference", {}, {"max_num_seqs": 4, "max_num_batched_tokens": 1024})
    toy.run(ToyEngine(), trials=1)
    return toy


def test_configuration_is_tried_next_and_told_to_the_search(study: ToyStudy) -> None:
    said = inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])

    study.run(ToyEngine(), trials=2)

    assert said == "max_num_seqs=16, max_num_batched_tokens=64 will be tried first by `tuner run toy`"
    assert study.trials[1].source == "operator"
    assert study.trials[1].params == {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    assert study.told()[1][0] == "COMPLETE"


def test_what_an_operator_asks_for_goes_before_recipes_that_wait(study: ToyStudy) -> None:
    study.proposer().enqueue("recipe:some", {"max_num_seqs": 1, "max_num_batched_tokens": 64})
    inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])

    study.run(ToyEngine(), trials=1)
    assert [t.source for t in study.trials] == ["reference", "operator"]
    study.run(ToyEngine(), trials=3)
    assert [t.source for t in study.trials] == ["reference", "recipe:some", "operator"]


def test_what_an_operator_asks_for_is_tried_whatever_the_budget(study: ToyStudy) -> None:
    inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])

    ending = study.run(ToyEngine(), trials=1)

    assert [t.source for t in study.trials] == ["reference", "operator"]
    assert ending.code == "budget"


def test_same_configuration_is_queued_once(study: ToyStudy) -> None:
    inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])

    assert "queued already" in inject("toy.yaml", ["max_num_batched_tokens=64", "max_num_seqs=16"])
    study.run(ToyEngine(), trials=2)
    assert "trial 1" in inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])
    assert not study.proposer().standing().queued


def test_what_waits_as_a_recipe_is_tried_at_once_when_the_operator_asks_and_not_measured_twice(study: ToyStudy) -> None:
    proposer = study.proposer()
    proposer.enqueue("recipe:other", {"max_num_seqs": 4, "max_num_batched_tokens": 64})
    proposer.enqueue("recipe:some", {"max_num_seqs": 16, "max_num_batched_tokens": 64})

    inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64"])
    study.run(ToyEngine(), trials=1)
    assert [t.source for t in study.trials] == ["reference", "operator"]
    study.run(ToyEngine(), trials=4)
    assert not study.proposer().standing().queued
    asked_for = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
    assert [t.source for t in study.trials if t.params == asked_for] == ["operator"]


def test_configuration_that_changes_the_probe_is_no_trial_of_a_study_that_corrects_by_it(study: ToyStudy) -> None:
    chunks = {"space": {"max_num_seqs": [1, 4, 16]}, "measure": {"drift": "correct"}}
    Path("toy.yaml").write_text(yaml.safe_dump({**SPEC, **TWIN, **chunks}))

    with pytest.raises(UsageError, match=r"--set max_num_batched_tokens=64: changes the speed probe itself"):
        inject("toy.yaml", ["max_num_batched_tokens=64"])


def test_configuration_that_the_space_has_no_place_for_is_tried_and_nothing_is_learned(study: ToyStudy) -> None:
    said = inject("toy.yaml", ["max_num_seqs=16", "max_num_batched_tokens=64", "max_model_len=4096"])
    study.run(ToyEngine(), trials=2)

    assert "the search learns nothing" in said
    assert study.trials[1].config.args["max_model_len"] == 4096
    assert study.told()[1][0] == "FAIL"


def test_configuration_beside_the_space_is_tried_and_the_search_learns_from_it(study: ToyStudy) -> None:
    said = inject("toy.yaml", ["max_num_seqs=5", "max_num_batched_tokens=64"])
    study.run(ToyEngine(), trials=2)

    assert "learns nothing" not in said
    assert study.trials[1].config.args["max_num_seqs"] == 5
    assert study.told()[1][0] == "FAIL"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "give what to try"),
        (["max_num_seqs"], "write it as KEY=VALUE"),
        (["max_num_seq=4"], "did you mean max_num_seqs"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_a_reason(study: ToyStudy, texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        inject("toy.yaml", texts)
    assert not study.proposer().standing().queued


def test_what_is_the_same_in_all_trials_stays_so(study: ToyStudy) -> None:
    fixed = {"engine": {**TWIN["engine"], "args": {"block_size": 16}}}
    Path("toy.yaml").write_text(yaml.safe_dump({**SPEC, **fixed}))

    with pytest.raises(UsageError, match="it is 16 in all trials"):
        inject("toy.yaml", ["block_size=32"])


def test_study_that_was_never_run_has_no_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump({**SPEC, **TWIN}))

    with pytest.raises(StudyFileError, match="was not run"):
        inject("toy.yaml", ["max_num_seqs=16"])
