"""`tuner try`: a configuration that the operator wants tried next, in a study that runs or has been run.

It goes into Optuna's queue, which another process may write to at any time and which outlives both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.commands import argument_changes, load
from tuner.config import EngineConfig
from tuner.engine.config_check import ConfigChecker, Refused
from tuner.errors import UsageError
from tuner.first_trials import defaults
from tuner.ledger import TrialState
from tuner.night import OPERATOR
from tuner.opening import base_config, proposer_of
from tuner.probe import is_felt
from tuner.study_file import StudyFile

_TELLS = (TrialState.COMPLETE, TrialState.INFEASIBLE, TrialState.RUNNING)
"""States of a trial that make another one of the same configuration useless."""


def inject(study: str, texts: Sequence[str]) -> str:
    """Queue a configuration to be tried next, and say what becomes of it; the same one is queued once.

    Parameters
    ----------
    texts:
        `KEY=VALUE` of engine arguments and `env.NAME` variables; what is not named is as vLLM has it.

    Raises
    ------
    UsageError
        For a change that vLLM or the study does not allow, with the reason.
    StudyFileError
        When there is no such study, or nothing of it was run here.
    """
    file, seen, folder = load(study)
    changes = argument_changes(texts)
    _see_that_it_may_vary(file, changes)
    wanted = base_config(file).with_args(changes)
    for trial in seen.trials:
        if trial.config.key() == wanted.key() and trial.state in _TELLS:
            return f"trial {trial.number} is this configuration already ({trial.state}); nothing was queued"
    proposer = proposer_of(file, folder)
    if changes in proposer.queued(OPERATOR):
        return "this configuration is queued already; nothing was queued"
    place = _checked(file, wanted, folder.path / "try.log")
    teaches = proposer.enqueue(OPERATOR, changes, place, at_once=True)
    when = "next by the run that is going on" if folder.is_running() else f"first by `tuner run {file.spec.study}`"
    learns = "" if teaches else "; the space has no place for it, so that it is shown and the search learns nothing"
    return f"{_words(changes)} will be tried {when}{learns}"


def _see_that_it_may_vary(file: StudyFile, changes: Mapping[str, Any]) -> None:
    if not changes:
        raise UsageError("give what to try as --set KEY=VALUE, such as --set max_num_seqs=64")
    fixed = {**file.spec.engine.args, **{f"env.{name}": value for name, value in file.spec.engine.env.items()}}
    for name in changes:
        if name in fixed:
            raise UsageError(
                f"--set {name}: it is {fixed[name]} in all trials of this study (engine in {file.path}) and others "
                "could not be compared; leave it out, or make a study of its own"
            )
        if file.spec.measure.drift == "correct" and is_felt(name, [changes[name]]):
            raise UsageError(
                f"--set {name}={changes[name]}: changes the speed probe itself, by which this study corrects its times "
                f"(measure.drift: correct in {file.path}); try it in a study with drift: record"
            )


def _checked(file: StudyFile, wanted: EngineConfig, log_path: Path) -> dict[str, Any]:
    """Ask vLLM about the configuration, and return its own values of what the study searches.

    Raises
    ------
    UsageError
        When vLLM refuses it.
    """
    if file.spec.engine.backend != "vllm":
        return {}
    checker = ConfigChecker(log_path)
    try:
        answer = checker.check(wanted)
        if isinstance(answer, Refused):
            raise UsageError(f"vLLM refuses this configuration: {answer.message}")
        return defaults(file, base_config(file), checker)
    finally:
        checker.close()


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())
