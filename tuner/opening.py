"""Opening a study: from a study file to everything that the loop works with, or one sentence that says why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from objectives.constraints import Constraint
from tuner.chooser import Foresight
from tuner.config import EngineConfig
from tuner.engine.accelerators import accelerator_type_of, gpus_here
from tuner.engine.config_check import ConfigChecker
from tuner.engine.pool import FixedPool
from tuner.engine.protocol import EnginePool, TrialEngine
from tuner.engine.vllm import vllm_version
from tuner.errors import PreflightError, StudyFileError, UsageError, WorkloadError
from tuner.first_trials import defaults, first_sources, queue_first_trials
from tuner.gate import ForMemory, Gate
from tuner.identity import begin
from tuner.judge import objectives_of, user_metrics
from tuner.ledger import History
from tuner.memory_model import MeasuredMemory, MemoryPrediction, predict
from tuner.model_files import config_folder, config_json, context_tokens, vocabulary, weight_bytes
from tuner.proposer import Proposer
from tuner.quiet import Considerate, needs_quiet
from tuner.search.guide import BRIEF, THOROUGH
from tuner.storage import storage_of
from tuner.study import Listener, Rooms
from tuner.study_file import StudyFile
from tuner.study_folder import STORE, StudyFolder
from tuner.tracking import BackgroundTracker, Tracker, default_artifact_root, default_uri
from tuner.workload.build import BuiltWorkload, build

if TYPE_CHECKING:
    from tuner.engine.ray_pool import RayEnginePool
    from tuner.engine.twin.devices import DeviceSpec
    from tuner.engine.twin.engine import TwinEngine
    from tuner.twin_helper import TwinHelper

RATIO_UNITS = frozenset({"s", "tokens/s"})
"""Units of objectives that are never 0, so that the sampler can be told their logarithm."""
TRACKING_CLOSE_S = 90.0
"""What the study waits at its end for MLflow to have everything."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the memory model and the twin need to know of the device that engines get."""

    device: str
    name: str
    total_gib: float
    vllm_version: str


def base_config(file: StudyFile) -> EngineConfig:
    """Return what every trial of a study starts with."""
    return EngineConfig({"model": file.model, **file.spec.engine.args}, dict(file.spec.engine.env))


def tracker_of(file: StudyFile, store: Path = STORE) -> Tracker:
    """Return the tracker of a study's experiment."""
    root = store.resolve().parent
    return Tracker(
        objectives_of(file),
        uri=file.spec.tracking.uri or default_uri(root),
        artifact_root=default_artifact_root(root),
        experiment=file.spec.tracking.experiment,
    )


def build_workload(file: StudyFile, store: Path = STORE, *, download: bool = False) -> BuiltWorkload:
    """Build a study's workload and see that the model can hold its longest request.

    Parameters
    ----------
    download:
        Whether the hub may be asked for a tokenizer that is not on this machine; without one, token ids are of a
        cautious range, which changes the workload's fingerprint and nothing that can be predicted.

    Raises
    ------
    StudyFileError, WorkloadError
        When it cannot be built, or a request is longer than the model's context or a fixed `max_model_len`.
    """
    cache = store.resolve() / "cache"
    spec = file.spec.workload
    tokenizer = None
    if spec.needs_tokenizer:
        from tuner.workload.tokenizer import load

        trusted = bool(file.spec.engine.args.get("trust_remote_code"))
        tokenizer = load(file.model, trust_remote_code=trusted, download=download)
    ids = vocabulary(file, cache, download=download)
    try:
        built = build(spec, tokenizer=tokenizer, vocabulary=ids, base_folder=file.folder, cache_folder=cache)
    except WorkloadError as error:
        raise WorkloadError(f"{file.path}: workload: {error}") from error
    longest = built.workload.longest_tokens
    fixed = file.spec.engine.args.get("max_model_len")
    if isinstance(fixed, int) and fixed < longest:
        text = (
            f"{fixed} cannot hold the workload's longest request of {longest} tokens; raise it or shorten the workload"
        )
        raise StudyFileError(str(file.path), [("engine.args.max_model_len", text)])
    config = config_json(file)
    context = context_tokens(config) if config else None
    if context is not None and longest > context and "hf_overrides" not in file.spec.engine.args:
        text = f"its longest request of {longest} tokens is longer than the model's context of {context}; shorten it"
        raise StudyFileError(str(file.path), [("workload", text)])
    if (
        built.workload.requests
        and len(built.workload.requests) * file.spec.measure.repeats < file.spec.measure.min_requests
    ):
        raise WorkloadError(
            f"{file.path}: workload: {len(built.workload.requests)} requests are fewer than measure.min_requests "
            f"({file.spec.measure.min_requests}); every trial would be void"
        )
    return built


def memory_predictor(file: StudyFile, machine: Machine, history: Callable[[], History]) -> ForMemory:
    """Return what predicts the memory of a configuration on this machine, learning from the trials so far."""
    config, weights = config_json(file), weight_bytes(file)

    def prediction(engine: EngineConfig) -> MemoryPrediction | None:
        if config is None:
            return None
        return predict(
            config,
            _memory_args(engine),
            machine.total_gib,
            machine.vllm_version,
            weight_bytes=weights,
            measured=_measured(history()),
            device="cpu" if machine.device == "cpu" else "cuda",
            gpu_name=machine.name,
        )

    return prediction


def _memory_args(config: EngineConfig) -> dict[str, Any]:
    return {**config.args, **{f"env.{name}": value for name, value in config.env.items()}}


def _measured(history: History) -> list[MeasuredMemory]:
    """What trials showed of memory. The pool only where the engine was left to size it."""
    return [
        MeasuredMemory(_memory_args(t.config), weights_gib=t.engine.weights_gib, kv_gib=t.engine.kv_gib)
        for t in history.finished
        if t.engine is not None and not t.predicted and "kv_cache_memory_bytes" not in t.config.args
    ]


def machine_of(file: StudyFile) -> Machine:
    """Look at the device that this machine gives its engines, or at the catalogue's for the twin."""
    if file.spec.engine.backend == "twin":
        from tuner.engine.twin.devices import find_device

        device = find_device(_twin_device(file))
        kind = "cpu" if device.kind == "cpu" else "cuda"
        return Machine(kind, device.name, device.memory_gib, vllm_version())
    if file.spec.resources.gpus_per_engine == 0:
        return Machine("cpu", "cpu", psutil.virtual_memory().total / 2**30, vllm_version())
    if cluster_address() == "local":
        gpus = gpus_here()
    else:
        from tuner.engine.cluster import Cluster, gpus_of

        gpus = gpus_of(Cluster(cluster_address()), file.spec.resources.accelerator_type)
    if gpus is None:
        raise PreflightError(
            f"the study asks for {file.spec.resources.gpus_per_engine} GPUs (resources.gpus_per_engine) and NVML shows "
            "none there; run it where they are, or set engine.backend: twin to predict"
        )
    return Machine("cuda", gpus.name, gpus.total_gib, vllm_version())


def planned_machine(file: StudyFile) -> tuple[Machine, DeviceSpec]:
    """Return the device that a study is for, on this machine or another, and the catalogue's entry to predict it by.

    Raises
    ------
    TunerError
        When the file names no device, none is here, or the catalogue does not know it.
    """
    from tuner.engine.twin.devices import find_device

    spec = file.spec
    if spec.engine.backend == "twin" or spec.resources.gpus_per_engine == 0:
        machine = machine_of(file)
        return machine, find_device(machine.name)
    wanted = spec.resources.accelerator_type
    try:
        machine = machine_of(file)
    except PreflightError as error:
        if wanted is None:
            text = f"{error}; to plan for a device that is not here, name it under resources.accelerator_type"
            raise PreflightError(text) from error
    else:
        if wanted in (None, accelerator_type_of(machine.name)):
            return machine, find_device(machine.name)
    try:
        device = find_device(str(wanted))
    except UsageError as error:
        raise StudyFileError(str(file.path), [("resources.accelerator_type", str(error))]) from error
    return Machine("cuda", device.name, device.memory_gib, vllm_version()), device


def _twin_device(file: StudyFile) -> str:
    if file.spec.engine.device is None:
        raise StudyFileError(str(file.path), [("engine.device", "is needed for the twin: a device such as a6000")])
    return file.spec.engine.device


def make_pool(file: StudyFile, folder: StudyFolder, memory: ForMemory) -> EnginePool:
    """Return the engines that run a study's trials; nothing is started before the first trial."""
    if file.spec.engine.backend == "twin":
        from tuner.engine.twin.devices import find_device

        return FixedPool([make_twin(file, find_device(_twin_device(file)), memory)], "the twin")
    engines = file.spec.resources.engines
    return _ray_pool(file, folder, None if engines == "all" else engines)


@contextmanager
def one_engine(file: StudyFile, folder: StudyFolder, memory: ForMemory) -> Iterator[TrialEngine]:
    """Hold one engine that gets what each of the study's engines gets."""
    if file.spec.engine.backend == "twin":
        from tuner.engine.twin.devices import find_device

        yield make_twin(file, find_device(_twin_device(file)), memory)
        return
    pool = _ray_pool(file, folder, 1)
    try:
        yield pool.first()
    finally:
        pool.close()


def _ray_pool(file: StudyFile, folder: StudyFolder, engines: int | None) -> RayEnginePool:
    from tuner.engine.cluster import Wanted
    from tuner.engine.ray_pool import RayEnginePool

    resources = file.spec.resources
    return RayEnginePool(
        engines=engines,
        wanted=Wanted(
            gpus=resources.gpus_per_engine,
            nodes=resources.nodes_per_engine,
            accelerator_type=resources.accelerator_type,
        ),
        address=cluster_address(),
        note_processes=folder.note_processes,
    )


def cluster_address() -> str:
    """Return Ray's own variable, which is set for a job on a cluster; without it the study starts Ray for itself."""
    return os.environ.get("RAY_ADDRESS") or "local"


def make_twin(file: StudyFile, device: DeviceSpec, memory: ForMemory) -> TwinEngine:
    """Return what predicts a study's trials on a device of the catalogue.

    Raises
    ------
    StudyFileError
        When the model's `config.json` is not on this machine.
    """
    from tuner.engine.twin.engine import TwinEngine
    from tuner.twin_memory import oracle

    model = config_folder(file)
    if model is None:
        text = "is not on this machine, and the twin needs its config.json; name one under model_config_file"
        raise StudyFileError(str(file.path), [("model", text)])
    return TwinEngine(device, model, oracle(memory))


def proposer_of(
    file: StudyFile,
    folder: StudyFolder,
    gate: Gate | None = None,
    twin: TwinHelper | None = None,
    noted: Callable[[str], None] = lambda _: None,
) -> Proposer:
    """Return what proposes a study's trials, with all that it was told so far.

    Parameters
    ----------
    gate:
        What it refuses is not proposed; without one, nothing is known of a configuration before it runs.
    twin:
        Predicts the objectives of configurations, for the proposals to learn from.
    """
    base = base_config(file)

    def admits(changes: Mapping[str, Any]) -> float:
        return gate.check(base.with_args(changes)).expected_violation if gate else 0.0

    storage = storage_of(file, folder)
    return Proposer(
        storage.url,
        storage.study,
        file.spec.space,
        file.spec.search,
        constraints=[str(Constraint.parse(text)) for text in file.spec.constraints],
        objectives=[(o.unit in RATIO_UNITS, 1 if o.direction == "minimize" else -1) for o in objectives_of(file)],
        admits=admits,
        foresight=Foresight(twin, ahead=True, effort=BRIEF if needs_quiet(file) else THOROUGH) if twin else None,
        noted=noted,
    )


@contextmanager
def opened(
    file: StudyFile, listener: Listener, *, fresh: bool, allow_different: bool = False, store: Path = STORE
) -> Iterator[Rooms]:
    """Hold a study and everything that its loop works with; closed in order whatever happens inside.

    Parameters
    ----------
    allow_different:
        Whether a study that was begun may go on with another release of vLLM.

    Raises
    ------
    TunerError
        When the study cannot run: the file does not match what was begun, the store cannot be written, another process
        runs it, or the machine is not what it asks for.
    """
    from tuner.twin_helper import twin_of

    folder = StudyFolder.of(file.spec.study, store)
    with ExitStack() as stack:
        folder.prepare()
        stack.enter_context(folder.locked())
        if fresh and folder.ledger.path.exists():
            listener.noted(f"the earlier study was moved to {folder.set_aside()}")
            folder.prepare()
            stack.enter_context(folder.locked())
        if left := folder.end_left_processes():
            listener.noted(f"ended {left} processes that an earlier run left behind")
        metrics = user_metrics(file)
        built = build_workload(file, store, download=file.spec.engine.backend == "vllm")
        machine = machine_of(file)
        if said := begin(file, folder, built.workload, machine.vllm_version, allow_different=allow_different):
            listener.noted(said)
        folder.remember_origin(file.path)
        ledger = folder.ledger
        memory = memory_predictor(file, machine, ledger.history)
        checker = None
        if file.spec.engine.backend == "vllm":
            checker = ConfigChecker(folder.path / "config-check.log")
            stack.callback(checker.close)
        gate = Gate(
            checker,
            memory,
            longest_tokens=built.workload.longest_tokens,
            memory=_gate_mode(file, ledger.history()),
            num_gpus=file.spec.resources.gpus_per_engine,
        )
        objectives = objectives_of(file)
        twin = twin_of(file, store, listener.noted)
        if twin is not None:
            stack.callback(twin.close)
        proposer = proposer_of(file, folder, gate, twin, listener.noted)
        if twin is not None and needs_quiet(file):
            listener = Considerate(listener, proposer.rest_predictions)
        if not first_sources(file) <= proposer.sources():
            place = defaults(file, base_config(file), checker)
            queue_first_trials(file, proposer, built.workload, listener.noted, place)
        pool = make_pool(file, folder, memory)
        stack.callback(pool.close)
        tracking = BackgroundTracker(tracker_of(file, store), ledger.history, folder.path, listener.noted)
        stack.callback(_close_tracking, tracking, listener)
        yield Rooms(
            file=file,
            folder=folder,
            workload=built.workload,
            base=base_config(file),
            objectives=objectives,
            user_metrics=metrics,
            proposer=proposer,
            gate=gate,
            pool=pool,
            listener=listener,
            after_trial=tracking.wake,
        )


def _close_tracking(tracking: BackgroundTracker, listener: Listener) -> None:
    if not tracking.close(TRACKING_CLOSE_S):
        listener.noted("MLflow does not have everything yet; `tuner track` brings it up to date from the ledger")


def _gate_mode(file: StudyFile, history: History) -> Any:
    """What the memory model may do, given what earlier trials of this study have proven about it."""
    proven = [note for note in history.notes if note.code == "gate"]
    if file.spec.gate.memory != "verify" or not proven:
        return file.spec.gate.memory
    return "off" if "refuses nothing" in proven[-1].text else "refuse"
