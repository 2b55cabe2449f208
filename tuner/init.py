"""`tuner init`: a commented study file for a model and the machine that is here.

Decides with arithmetic on the model's `config.json` and the device's data sheet; starts nothing and asks no hub.
`study_template` writes the words.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tuner.engine.accelerators import Gpus, accelerator_type_of, gpus_here
from tuner.engine.twin.devices import DeviceSpec, find_device
from tuner.engine.vllm import vllm_version
from tuner.errors import UsageError
from tuner.memory_model import MemoryPrediction, predict
from tuner.model_arch import AttentionKind
from tuner.model_config import read_arch
from tuner.model_files import config_json, context_tokens, weight_bytes
from tuner.model_weights import parameters
from tuner.recipes import RECIPES, Skipped, applicable
from tuner.spec import StudySpec, is_local_model
from tuner.study_file import StudyFile
from tuner.study_template import StudyText, render

QUICKSTART_MODEL = Path("models/smollm2-135m-instruct")
PLACEHOLDER = "./put-your-model-here"
"""A folder that is not there, which `tuner check` says in one sentence."""

CPU_RECIPES = ("low-latency", "balanced-online")
"""The others are for batches and contexts that no CPU serves."""

LOAD = 0.4
"""Share of what the device can compute that the arrivals ask for: busy, and able to keep up."""
REACHED = 0.5
"""Share of the data sheet's peaks that serving reaches, prefill and decode alike; `tuner plan` knows better."""
DECODE_BATCH = 16
"""Requests that share one reading of the weights while tokens are generated."""
RATE_UNKNOWN_PER_S = 0.5

_MIB, _GIB = 2**20, 2**30
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Written:
    """The file, and what it is about in one line."""

    path: Path
    summary: str


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model here.

    Parameters
    ----------
    reference:
        As the study file names it.
    config:
        Its `config.json`; `None` where it is not on this machine, and then so is the rest.
    """

    reference: str
    config: dict[str, Any] | None = None
    weight_bytes: int | None = None

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence that it was made for."""
        return context_tokens(self.config) if self.config else None

    @property
    def parameters(self) -> float | None:
        """Number of its parameters."""
        return parameters(read_arch(self.config)) if self.config else None

    @property
    def heads(self) -> int | None:
        """Attention heads of its first layer that has any: what tensor parallelism divides."""
        layers = read_arch(self.config).layers if self.config else ()
        return next((x.attention.heads for x in layers if x.attention and x.attention.heads), None)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The workload's lengths, in tokens."""

    prompts: Mapping[int, int]
    output: int

    @property
    def mean_prompt(self) -> float:
        """Mean prompt."""
        return sum(length * times for length, times in self.prompts.items()) / sum(self.prompts.values())

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request."""
        return max(self.prompts) + self.output


def write_study_file(model: str | None, output: Path) -> Written:
    """Write a study file for this model on this machine.

    Parameters
    ----------
    model:
        Folder or Hugging Face name. `None`: the quickstart's model where it is, else a placeholder.

    Raises
    ------
    UsageError
        When the file is there already or cannot be written, or the model is neither a folder with a model nor a name.
    """
    if output.exists():
        raise UsageError(f"{output}: is there already; name another file with -o, or remove this one")
    chosen = _model(model, output)
    gpus = gpus_here()
    study = _for_gpus(chosen, gpus) if gpus else _for_cpu(chosen)
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(render(_name(chosen, output), study))
    except OSError as error:
        raise UsageError(f"{output}: cannot be written ({error.strerror}); name another file with -o") from error
    requests = sum(study.prompt_tokens.values())
    shortest, longest = min(study.prompt_tokens), max(study.prompt_tokens)
    summary = (
        f"{chosen.reference} on {study.machine}; {requests} requests of {shortest:,} to {longest:,} tokens, "
        f"{len(study.space)} parameters searched; {study.memory}"
    )
    return Written(output, summary)


# The model ----------------------------------------------------------------------------------------------------------


def _model(model: str | None, output: Path) -> Model:
    if model is None:
        return _local(QUICKSTART_MODEL, output) if QUICKSTART_MODEL.is_dir() else Model(PLACEHOLDER)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _local(folder, output)
    if is_local_model(model) or not _HUB_NAME.fullmatch(model):
        raise UsageError(f"--model {model}: there is no such folder; give one, or a Hugging Face name like org/name")
    return _known(model, output)


def _local(folder: Path, output: Path) -> Model:
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {folder}: the folder holds no config.json, so it is no model that vLLM can load")
    relative = Path(os.path.relpath(folder.resolve(), output.resolve().parent)).as_posix()
    return _known(relative if relative.startswith(".") else f"./{relative}", output)


def _known(reference: str, output: Path) -> Model:
    """Read what this machine knows of a model, through the least study that names it."""
    least = {
        "study": "least",
        "model": reference,
        "workload": {
            "kind": "long_documents",
            "requests": 1,
            "prompt_tokens": 1,
            "output_tokens": 1,
            "arrivals": {"kind": "constant", "rate_per_s": 1},
        },
        "space": {"max_num_seqs": [1]},
        "budget": {"trials": 1},
    }
    file = StudyFile(output.resolve(), StudySpec.model_validate(least))
    return Model(reference, config_json(file), weight_bytes(file))


def _model_comment(model: Model) -> str:
    if model.reference == PLACEHOLDER:
        return "your model: a folder, or a Hugging Face name"
    return "" if model.config is not None else "not on this machine yet"


def _name(model: Model, output: Path) -> str:
    """Name the study after its file, or after the model where the file has the usual name."""
    usual = "my-study" if model.reference == PLACEHOLDER else model.reference.rsplit("/", 1)[-1].lower()
    stem = output.stem if output.stem != "study" else usual
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-")[:80]
    return name or "study"


# The machine --------------------------------------------------------------------------------------------------------


def _for_gpus(model: Model, gpus: Gpus) -> StudyText:
    parallel = _tensor_parallel(gpus.count, model.heads)
    lengths = _lengths(model, {512: 24, 2048: 16, 8192: 12, 32768: 8}, 256)
    length = _max_model_len(lengths, model)
    args = {"tensor_parallel_size": parallel, "max_model_len": length}
    space = {
        "gpu_memory_utilization": {"low": 0.8, "high": 0.96, "step": 0.02},
        "max_num_seqs": [8, 16, 32, 64, 128, 256],
        "max_num_batched_tokens": {"low": 512, "high": 32768, "log": True},
        "long_prefill_token_threshold": [t for t in (0, 1024, 4096) if t <= length],
        "enable_prefix_caching": [True, False],
    }
    prediction = _memory(model, args, gpus.total_gib, gpus.name)
    return StudyText(
        machine=f"{gpus.count} × {gpus.name}" if gpus.count > 1 else gpus.name,
        model=model.reference,
        model_comment=_model_comment(model),
        args=args,
        env=_env(model),
        resources={"gpus_per_engine": parallel, "accelerator_type": accelerator_type_of(gpus.name)},
        prompt_tokens=lengths.prompts,
        output_tokens=lengths.output,
        rate_per_s=_rate(model, lengths, _catalogued(gpus.name), parallel),
        space=space,
        recipes=_recipes(tuple(RECIPES), args, lengths, parallel),
        budget={"hours": 8},
        measure={},
        memory=_memory_text(prediction),
    )


def _for_cpu(model: Model) -> StudyText:
    ram_gib = psutil.virtual_memory().total / _GIB
    cores = psutil.cpu_count(logical=False) or 1
    lengths = _lengths(model, {256: 8, 1024: 8, 2048: 4, 3500: 4}, 32)
    args: dict[str, Any] = {"max_model_len": _max_model_len(lengths, model), "enforce_eager": True}
    pools = _pools(model, args, ram_gib)
    args["gpu_memory_utilization"] = _share_of_ram(model, pools, ram_gib)
    space: dict[str, Any] = {
        "max_num_seqs": [1, 2, 4, 8, 16, 32, 64],
        "max_num_batched_tokens": {"low": 64, "high": 4096, "log": True},
        "kv_cache_memory_bytes": pools,
    }
    if _plain_attention(model):
        space["block_size"] = [32, 64, 128]
    return StudyText(
        machine=f"this machine's CPU ({cores} cores, {ram_gib:.0f} GiB)",
        model=model.reference,
        model_comment=_model_comment(model),
        args=args,
        env=_env(model),
        resources={},
        prompt_tokens=lengths.prompts,
        output_tokens=lengths.output,
        # The catalogue's CPU is two cores.
        rate_per_s=_rate(model, lengths, find_device("cpu"), cores / 2),
        space=space,
        recipes=_recipes(CPU_RECIPES, args, lengths, 0),
        budget={"trials": 12},
        measure={"start_budget_s": 600, "run_budget_s": 1800},
        memory=_memory_text(_memory(model, args, ram_gib, "", on_cpu=True)),
    )


def _tensor_parallel(count: int, heads: int | None) -> int:
    """Largest power of two of the GPUs that divides the attention heads."""
    parallel = 1 << (count.bit_length() - 1)
    while heads is not None and heads % parallel:
        parallel //= 2
    return parallel


def _lengths(model: Model, prompts: Mapping[int, int], output: int) -> Lengths:
    """Keep the lengths that fit into the model's context; half of it where none does."""
    context = model.context_tokens
    if context is None:
        shorter = dict(list(prompts.items())[:-1])
        return Lengths(shorter, output)
    output = min(output, max(1, context // 4))
    fitting = {length: times for length, times in prompts.items() if length + output <= context}
    return Lengths(fitting or {max(1, context // 2): sum(prompts.values())}, output)


def _max_model_len(lengths: Lengths, model: Model) -> int:
    rounded = -(-lengths.longest // 256) * 256
    return min(rounded, model.context_tokens or rounded)


def _rate(model: Model, lengths: Lengths, device: DeviceSpec | None, devices: float) -> float:
    """Arrivals a second that keep the devices busy by their data sheet, in two digits.

    A prompt token costs two operations a parameter; an output token a share of one reading of the weights (2 bytes a
    parameter), which a batch divides.
    """
    if device is None or model.parameters is None:
        return RATE_UNKNOWN_PER_S
    prefill_tokens_per_s = REACHED * devices * device.bf16_tflops * 1e12 / (2 * model.parameters)
    decode_tokens_per_s = DECODE_BATCH * REACHED * devices * device.bandwidth_gb_s * 1e9 / (2 * model.parameters)
    seconds = lengths.mean_prompt / prefill_tokens_per_s + lengths.output / decode_tokens_per_s
    return float(f"{LOAD / seconds:.2g}")


def _catalogued(name: str) -> DeviceSpec | None:
    try:
        return find_device(name)
    except UsageError:
        return None


def _recipes(names: tuple[str, ...], args: Mapping[str, Any], lengths: Lengths, num_gpus: int) -> list[str]:
    """Recipes that can be tried here, each set of changes once."""
    changes = {name: applicable(name, fixed=args, longest_tokens=lengths.longest, num_gpus=num_gpus) for name in names}
    found: dict[str, Mapping[str, Any]] = {}
    for name, change in changes.items():
        if not isinstance(change, Skipped) and change not in found.values():
            found[name] = change
    return list(found)


# Memory -------------------------------------------------------------------------------------------------------------


def _env(model: Model) -> dict[str, int]:
    return {"HF_HUB_OFFLINE": 1} if is_local_model(model.reference) else {}


def _memory(
    model: Model, args: Mapping[str, Any], total_gib: float, gpu_name: str, *, on_cpu: bool = False
) -> MemoryPrediction | None:
    if model.config is None or total_gib <= 0:
        return None
    return predict(
        model.config,
        dict(args),
        total_gib,
        vllm_version(),
        weight_bytes=model.weight_bytes,
        device="cpu" if on_cpu else "cuda",
        gpu_name=gpu_name,
    )


def _memory_text(prediction: MemoryPrediction | None) -> str:
    if prediction is None:
        return "whether it fits is not known, since the model is not on this machine"
    if prediction.fits:
        return f"predicted to fit, with room for {prediction.kv_tokens:,} tokens in the KV cache"
    return f"predicted not to fit ({prediction.violation:+.2f} of the memory): `tuner memory` shows where it goes"


def _pools(model: Model, args: Mapping[str, Any], ram_gib: float) -> list[int]:
    """Sizes of the KV cache from just one request of `max_model_len` to many, in bytes, within a third of the RAM."""
    prediction = _memory(model, args, ram_gib, "", on_cpu=True)
    if prediction is None or not prediction.kv_bytes_per_token:
        return [_GIB, 2 * _GIB, 4 * _GIB]
    one = prediction.kv_bytes_per_token * args["max_model_len"]
    sizes = [math.ceil(one * times / _MIB) * _MIB for times in (1.25, 2, 4, 8)]
    return [size for size in sizes if size <= ram_gib * _GIB / 3] or sizes[:1]


def _share_of_ram(model: Model, pools: list[int], ram_gib: float) -> float:
    """Share of the RAM for weights, the largest of the pools, and the engine's own: vLLM would take nine tenths."""
    weights = model.weight_bytes or 2 * (model.parameters or 0)
    wanted_gib = (weights + pools[-1]) / _GIB + 1.0
    return min(0.8, max(0.1, math.ceil(100 * wanted_gib / ram_gib) / 100))


def _plain_attention(model: Model) -> bool:
    """Whether the model takes any block size: others need one of their own on the CPU."""
    if model.config is None:
        return False
    return all(
        x.attention is not None and x.attention.kind is AttentionKind.FULL for x in read_arch(model.config).layers
    )
