from __future__ import annotations

from pathlib import Path

from toy_study import DEFAULTS, WORKLOAD, Heard, ToyEngine, ToyStudy

from tuner.first_trials import first_sources, queue_first_trials


def queue(study: ToyStudy) -> Heard:
    heard = Heard()
    queue_first_trials(study.file, study.proposer(), WORKLOAD, heard.noted, DEFAULTS)
    return heard


def test_recipe_added_to_the_file_later_is_queued_once(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path)
    study.run(ToyEngine(), trials=2)
    assert first_sources(study.file) <= study.proposer().sources()

    study.changes = {"recipes": ["chat"]}
    assert not first_sources(study.file) <= study.proposer().sources()
    queue(study)
    queue(study)
    study.run(ToyEngine(), trials=4)

    assert [t.source for t in study.trials] == ["reference", "design", "recipe:chat", "design"]


def test_study_that_was_killed_while_it_began_is_completed(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, recipes=["chat", "low-latency"])

    queue(study)
    study.run(ToyEngine(), trials=3)

    assert [t.source for t in study.trials] == ["reference", "recipe:chat", "recipe:low-latency"]


def test_recipe_that_cannot_be_tried_is_skipped_with_its_reason(tmp_path: Path) -> None:
    study = ToyStudy.in_memory(tmp_path, recipes=["long-document-a6000"])

    heard = queue(study)

    assert heard.notes == [
        "recipe long-document-a6000 is skipped: it needs 4 GPUs (tensor_parallel_size), the study has 0"
    ]
