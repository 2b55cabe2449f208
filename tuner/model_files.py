"""What can be known of a model without an engine: its `config.json`, the bytes of its weights, its token ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tuner.artifacts import write_json
from tuner.errors import StudyFileError, WorkloadError
from tuner.model_weights import checkpoint_bytes
from tuner.spec import is_local_model
from tuner.study_file import StudyFile


def config_json(file: StudyFile) -> dict[str, Any] | None:
    """Read the model's `config.json`: from its folder, the study's `model_config_file`, or the local hub cache.

    Returns `None` when the model is not on this machine. Nothing is downloaded.

    Raises
    ------
    StudyFileError
        When the file is there and is no JSON object.
    """
    path = _config_path(file)
    if path is None:
        return None
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StudyFileError(str(file.path), [("model", f"{path} cannot be read as JSON ({error})")]) from error
    if not isinstance(document, dict):
        raise StudyFileError(str(file.path), [("model", f"{path} holds no JSON object")])
    return document


def config_folder(file: StudyFile) -> Path | None:
    """Folder that holds the model's `config.json`, or `None` when it is not on this machine."""
    path = _config_path(file)
    return path.parent.resolve() if path is not None else None


def _config_path(file: StudyFile) -> Path | None:
    if is_local_model(file.spec.model):
        return Path(file.model) / "config.json"
    if file.spec.model_config_file is not None:
        return file.folder / file.spec.model_config_file
    return _hub_file(file.spec.model, "config.json")


def _hub_file(model: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, name)
    return Path(found) if isinstance(found, str) else None


def weight_bytes(file: StudyFile) -> int | None:
    """Exact bytes of the checkpoint's tensors, or `None` when the weights are not on this machine."""
    if is_local_model(file.spec.model):
        return checkpoint_bytes(Path(file.model))
    index = _hub_file(file.spec.model, "model.safetensors.index.json") or _hub_file(
        file.spec.model, "model.safetensors"
    )
    return checkpoint_bytes(index.parent) if index else None


def context_tokens(config: dict[str, Any]) -> int | None:
    """Longest sequence that the model was made for, in tokens; `None` where its configuration does not say."""
    text = config.get("text_config", config)
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"):
        value = text.get(key) if isinstance(text, dict) else None
        if isinstance(value, int):
            return value
    return None


def vocabulary(file: StudyFile, cache_folder: Path, *, download: bool) -> tuple[int, int]:
    """Token ids that generated prompts may use, half-open; read from the tokenizer once and kept.

    Without the tokenizer (a model that is not on this machine), the upper nine tenths of the vocabulary: special
    tokens stand at its start or in its last entries, which are left out.

    Parameters
    ----------
    download:
        Whether the tokenizer may be fetched from the hub: where an engine will fetch the whole model anyway.
    """
    key = hashlib.sha256(f"{file.model} {_stamp(file)}".encode()).hexdigest()[:16]
    kept = cache_folder / f"vocabulary-{key}.json"
    if kept.exists():
        low, high = json.loads(kept.read_text())
        return int(low), int(high)
    from tuner.workload.tokenizer import load, vocabulary_of

    here = is_local_model(file.spec.model) or _hub_file(file.spec.model, "tokenizer_config.json") is not None
    if not (here or download):
        return _guessed_vocabulary(file)
    try:
        trusted = bool(file.spec.engine.args.get("trust_remote_code"))
        low, high = vocabulary_of(load(file.model, trust_remote_code=trusted, download=download))
    except WorkloadError:
        return _guessed_vocabulary(file)
    write_json(kept, [low, high])
    return low, high


def _guessed_vocabulary(file: StudyFile) -> tuple[int, int]:
    config = config_json(file) or {}
    size = int(config.get("text_config", config).get("vocab_size", 32_000))
    return size // 10, size - size // 100


def _stamp(file: StudyFile) -> str:
    """Something that changes when a local model's tokenizer does."""
    if not is_local_model(file.spec.model):
        return ""
    path = Path(file.model) / "tokenizer.json"
    return str(path.stat().st_mtime_ns) if path.exists() else ""
