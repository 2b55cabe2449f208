"""The study file: what is tuned, on what, with which workload, for what, and how long. Validated; nothing is guessed.

The descriptions of the fields are the documentation of the keys (`docs/study-file.md` is generated from them).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from objectives.constraints import Constraint
from tuner.section import Section
from tuner.space import Parameter, in_order, with_sound_conditions
from tuner.workload.spec import WorkloadSpec


def _as_environment(value: Any) -> Any:
    """YAML numbers and booleans in an `env` mapping become the text that a shell would hold."""
    if not isinstance(value, dict):
        return value
    return {
        k: str(int(v)) if isinstance(v, bool) else str(v) if isinstance(v, int | float) else v for k, v in value.items()
    }


class EngineSection(Section):
    """Which engine runs the trials, and what is the same in all of them."""

    backend: Literal["vllm", "twin"] = Field(
        default="vllm", description="`vllm` measures; `twin` predicts on vLLM's own scheduler with a virtual clock."
    )
    device: str | None = Field(
        default=None, description="Twin only: the device of the catalogue to predict for, such as `a6000`."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Engine arguments of every trial, by vLLM's own names; the reference too."
    )
    env: Annotated[dict[str, str], BeforeValidator(_as_environment)] = Field(
        default_factory=dict, description="Environment variables of every trial."
    )


class Resources(Section):
    """What engines get, and how many of them work at once."""

    gpus_per_engine: int = Field(default=0, ge=0, description="GPUs of one engine; 0 runs on the CPU.")
    engines: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        default=1,
        description="Engines at work at once, at most; `all`: as many as the cluster's GPUs allow, also those of "
        "machines that join later. On the CPU they share the cores evenly.",
    )
    accelerator_type: str | None = Field(
        default=None, description="Only run where Ray sees this accelerator, such as `RTX-A6000` (Ray's names)."
    )
    nodes_per_engine: int = Field(
        default=1, ge=1, description="Machines that one engine spans, its GPUs spread evenly over them."
    )

    @model_validator(mode="after")
    def _can_be_placed(self) -> Self:
        if self.nodes_per_engine > 1 and (not self.gpus_per_engine or self.gpus_per_engine % self.nodes_per_engine):
            raise ValueError(
                f"gpus_per_engine: {self.gpus_per_engine} GPUs cannot be spread evenly over "
                f"{self.nodes_per_engine} nodes (nodes_per_engine); give each node the same number, at least one"
            )
        if self.engines == "all" and not self.gpus_per_engine:
            raise ValueError("engines: `all` counts GPUs; on the CPU say how many engines share the cores")
        return self


class Objective(Section):
    """A metric that is optimised."""

    metric: str = Field(description="Name of a metric (`tuner check` lists them), or your own as `module:function`.")
    direction: Literal["minimize", "maximize"] | None = Field(
        default=None, description="Left out: as the metric says. Needed for your own."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_means_metric(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


def _parses(text: str) -> str:
    Constraint.parse(text)
    return text


ConstraintText = Annotated[str, AfterValidator(_parses)]
"""A constraint on a metric as `Constraint.parse` reads it."""


class Budget(Section):
    """When the study ends; whichever comes first."""

    trials: int | None = Field(
        default=None, ge=1, description="Trials that an engine runs; what the gate refuses is not counted."
    )
    hours: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Hours of one `tuner run`.")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.trials is None and self.hours is None:
            raise ValueError("give trials, hours, or both: a study needs an end")
        return self


class Measure(Section):
    """How one trial is measured."""

    repeats: int = Field(default=1, ge=1, description="Runs of the workload on one engine, with fresh token ids.")
    speed_probe: bool = Field(
        default=True, description="Measure before and after the workload how fast the machine is at the moment."
    )
    drift: Literal["record", "correct"] = Field(
        default="record",
        description="`correct` ranks times divided by the speed index; both values are kept. It takes a space that "
        "leaves the speed probe as it is: batching and memory, with pieces of 512 tokens or more.",
    )
    start_budget_s: float = Field(default=1800, gt=0, description="A start that takes longer is ended as hung.")
    run_budget_s: float = Field(default=3600, gt=0, description="A run that takes longer is ended as hung.")
    stop_budget_s: float = Field(default=120, gt=0, description="A stop that takes longer is enforced.")
    min_requests: int = Field(default=10, ge=1, description="A measurement on fewer finished requests is void.")
    speed_change_limit: float = Field(
        default=1.5,
        gt=1,
        description="A trial is void when the machine's speed changed by more than this factor in it.",
    )
    max_send_lateness_s: float = Field(
        default=0.25, gt=0, description="A trial is void when the client sent 1% of its requests later than this."
    )

    @model_validator(mode="after")
    def _can_correct(self) -> Self:
        if self.drift == "correct" and not self.speed_probe:
            raise ValueError("drift: correct takes the speed probe; set speed_probe: true, or drift: record")
        return self


class Noise(Section):
    """How the noise of the machine is measured beside the trials."""

    aa_runs: int = Field(
        default=1, ge=0, description="How often the reference is started and measured again to know the noise floor."
    )
    sentinel_every: int = Field(
        default=10, ge=0, description="Measure the reference again after this many trials to see drift; 0 never."
    )


class Search(Section):
    """How configurations are proposed."""

    sampler: Literal["gp", "tpe", "random"] = Field(
        default="gp",
        description="Who proposes after the first trials: `gp`, the tuner's own Gaussian process; `tpe` and `random` "
        "are Optuna's.",
    )
    twin: bool = Field(
        default=True,
        description="Whether the twin's predictions guide `gp`, where the model's config.json and the device are "
        "known. It learns how measured values differ from them, and goes without where that tells left-out trials "
        "better, beyond chance.",
    )
    stop_when_gain_below: Annotated[float, Field(gt=0, lt=1)] | Literal["noise"] | None = Field(
        default=None,
        description="End the study when three proposals in a row are expected to grow the front's hypervolume by less "
        "than this share (on a logarithmic scale of times), or with `noise` by less than the noise of one measurement "
        "of each member of the front changes it; left out: never. Two problems of the benchmark ended after 14 and 28 "
        "trials with 95 and 87% of the best known hypervolume (`noise`), after 17 and 38 with 94 and 91% (0.01), after "
        "24 and 52 with 97 and 94% (0.004).",
    )
    startup_trials: int = Field(
        default=4,
        ge=1,
        description="Configurations of the space that are tried before the sampler takes over: the reference and the "
        "recipes where the space has a place for them, then points that fill what fits evenly. Where the twin guides, "
        "`gp` takes over as soon as one was measured.",
    )
    end_dominated: bool = Field(
        default=False,
        description="Whether a run is ended early when it is certain that a member of the front is better in every "
        "objective, by a fifth and by twice the noise. It is kept as `censored`, with bounds in the place of values. "
        "Takes objectives that are percentiles or maxima of TTFT, TPOT or E2EL.",
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of everything that is drawn.")


class Gate(Section):
    """What is refused without starting an engine."""

    memory: Literal["verify", "refuse", "off"] = Field(
        default="verify",
        description="What the memory model may do. `verify`: the first configuration that it would refuse is started "
        "all the same, to prove the model on this machine; the next ones are refused. `refuse`: from the first on. "
        "`off`: never.",
    )


class Confirm(Section):
    """Whether members of the front are measured again at the end."""

    rounds: int = Field(default=0, ge=0, description="Further measurements of each member of the front at the end.")


def _is_web(url: str | None) -> str | None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError("write the webhook's address with http:// or https:// in front")
    return url


class Notify(Section):
    """Who is told when a run of the study is over, however it ended. The summary is one JSON document."""

    command: tuple[str, ...] = Field(
        default=(), description="A program with its arguments, started without a shell; it reads the summary on stdin."
    )
    url: Annotated[str | None, AfterValidator(_is_web)] = Field(
        default=None, description="A webhook that the summary is sent to by POST, with http:// or https://."
    )
    timeout_s: float = Field(
        default=10, gt=0, le=120, description="Seconds of one try; there are three, and a failed one changes nothing."
    )


class Prometheus(Section):
    """Figures for Prometheus while the study runs."""

    port: int | None = Field(
        default=None, ge=1, le=65535, description="Port on 127.0.0.1 that serves them; left out: none does."
    )


class Tracking(Section):
    """Where MLflow's runs go."""

    uri: str | None = Field(
        default=None,
        description="MLflow tracking URI; left out: the environment's MLFLOW_TRACKING_URI, or SQLite in mlruns/.",
    )
    experiment: str | None = Field(default=None, description="Name of the experiment; left out: the study's name.")


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"


class StudySpec(Section):
    """A study file."""

    study: str = Field(pattern=_NAME, description="Name of the study: letters, digits, dot, dash, underscore.")
    model: str = Field(
        min_length=1,
        description="The model: a folder (relative to this file; write ./ or ../ in front) or a Hugging Face name.",
    )
    model_config_file: str | None = Field(
        default=None,
        description="The model's config.json, for checks on a machine that does not have the model; relative to this "
        "file.",
    )
    engine: EngineSection = Field(default_factory=EngineSection, description="What is the same in all trials.")
    resources: Resources = Field(default_factory=Resources, description="What engines get, and how many work at once.")
    workload: WorkloadSpec = Field(description="The requests that every trial runs.")
    space: Annotated[dict[str, Parameter], AfterValidator(with_sound_conditions), AfterValidator(in_order)] = Field(
        min_length=1, description="What is searched."
    )
    recipes: tuple[str, ...] = Field(
        default=(), description="Named starting points that are tried after the reference (`tuner check` lists them)."
    )
    objectives: tuple[Objective, ...] = Field(
        default=(Objective(metric="ttft_p95_s"), Objective(metric="tpot_p95_s")),
        min_length=1,
        description="What is optimised.",
    )
    constraints: tuple[ConstraintText, ...] = Field(
        default=(), description="Limits on metrics, like `ttft_p99_s <= 20`. Memory is always a constraint."
    )
    slo: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict,
        description="Limits of one request for goodput: ttft_s, tpot_s, e2el_s.",
    )
    budget: Budget = Field(description="When the study ends.")
    measure: Measure = Field(default_factory=Measure, description="How a trial is measured.")
    noise: Noise = Field(default_factory=Noise, description="How noise is measured.")
    search: Search = Field(default_factory=Search, description="How configurations are proposed.")
    gate: Gate = Field(default_factory=Gate, description="What is refused without an engine.")
    confirm: Confirm = Field(default_factory=Confirm, description="Whether the front is measured again.")
    storage: str | None = Field(
        default=None,
        description="A PostgreSQL for Optuna, as `postgresql://USER@HOST:PORT/DATABASE` with the password in "
        "PGPASSWORD; left out: the environment's TUNER_STORAGE, or SQLite in the study's folder.",
    )
    tracking: Tracking = Field(default_factory=Tracking, description="Where MLflow's runs go.")
    notify: Notify = Field(default_factory=Notify, description="Who is told when a run is over.")
    prometheus: Prometheus = Field(
        default_factory=Prometheus, description="Figures for Prometheus while the study runs."
    )

    def identity_parts(self) -> dict[str, Any]:
        """Everything that makes two trials of this study comparable; what is left out may change on resume."""
        free = {"budget", "storage", "tracking", "confirm", "recipes", "noise", "gate", "notify", "prometheus"}
        document = self.model_dump(mode="json", exclude=free)
        document["search"] = {"sampler": document["search"]["sampler"]}
        document.pop("model_config_file")
        for parameter in document["space"].values():  # a file without conditions is what it was before there were any
            if not parameter["when"]:
                parameter.pop("when")
        if self.resources.gpus_per_engine:  # on the CPU, how many share the cores is what each gets
            document["resources"].pop("engines")
        return document

    def identity(self) -> str:
        """16 hex digits over `identity_parts`."""
        text = json.dumps(self.identity_parts(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_local_model(model: str) -> bool:
    """Whether a model is named as a folder rather than by its Hugging Face name."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def resolve_model(spec: StudySpec, study_folder: Path) -> str:
    """Return what vLLM is given as `model`: an absolute folder, or the Hugging Face name as it is."""
    return str((study_folder / Path(spec.model).expanduser()).resolve()) if is_local_model(spec.model) else spec.model
