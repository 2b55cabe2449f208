"""What a study begins with: vLLM's defaults as the reference, then the recipes that operators start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.config import EngineConfig
from tuner.engine.config_check import ConfigChecker, Refused
from tuner.errors import StudyFileError
from tuner.proposer import Proposer
from tuner.recipes import Skipped, applicable
from tuner.study_file import StudyFile
from tuner.workload.model import Workload


def defaults(file: StudyFile, base: EngineConfig, checker: ConfigChecker | None) -> dict[str, Any]:
    """Return vLLM's own values of all arguments for this model, where they can be known.

    Raises
    ------
    StudyFileError
        When vLLM refuses the study's fixed arguments: then no trial could start.
    """
    if checker is None:
        return {}
    answer = checker.check(base)
    if isinstance(answer, Refused):
        raise StudyFileError(str(file.path), [("engine.args", f"vLLM refuses them: {answer.message}")])
    return {**dict.fromkeys(file.spec.space), **answer.effective_args}


def recipe_changes(file: StudyFile, workload: Workload, name: str) -> Mapping[str, Any] | Skipped:
    """Return what a recipe changes in this study, or why the study skips it."""
    return applicable(
        name,
        fixed=file.spec.engine.args,
        longest_tokens=workload.longest_tokens,
        num_gpus=file.spec.resources.gpus_per_engine,
    )


def first_sources(file: StudyFile) -> set[str]:
    """Sources of the trials that a study begins with."""
    return {"reference", *(f"recipe:{name}" for name in file.spec.recipes)}


def queue_first_trials(
    file: StudyFile, proposer: Proposer, workload: Workload, noted: Callable[[str], None], place: dict[str, Any]
) -> None:
    """Queue vLLM's defaults as the reference, then the recipes that can hold the workload, each if it is not there.

    Something is there in a study that was killed while it began, or whose recipes were added later.
    """
    known = proposer.sources()
    if "reference" not in known:
        proposer.enqueue("reference", {}, place, at_once=True)
    for name in file.spec.recipes:
        changes = recipe_changes(file, workload, name)
        if isinstance(changes, Skipped):
            noted(f"recipe {name} is skipped: {changes.reason}")
        elif f"recipe:{name}" not in known:
            proposer.enqueue(f"recipe:{name}", changes, place)
