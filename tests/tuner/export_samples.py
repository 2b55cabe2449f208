"""Deployments for the tests of the exports, and the golden files made of the first of them.

Golden files are written anew with

    PYTHONPATH=. python tests/tuner/export_samples.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tuner.export import FORMATS
from tuner.export.deployment import Deployment, MeasuredValue

GOLDEN = Path(__file__).parents[1] / "data" / "export"
HOSTILE = "a b'c\"d$(touch hacked)`id`${HOME}$HOME\\n%n{{.Name}}\nend: - # é"
"""Everything that a shell, a YAML reader, systemd, Compose, Kubernetes or a template might take for its own."""


def plain() -> Deployment:
    """Four GPUs, every type of value that an engine argument can have, a variable and a secret."""
    return Deployment(
        name="longdoc-trial-7",
        model="Qwen/Qwen3-32B",
        model_is_folder=False,
        args={
            "compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 2, 4]},
            "cudagraph_capture_sizes": [1, 2, 4, 8],
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.85,
            "hf_overrides": {"rope_scaling": {"factor": 2.0, "rope_type": "yarn"}},
            "kv_cache_dtype": "fp8",
            "max_model_len": 32768,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 32,
            "served_model_name": ["qwen", "qwen3-32b"],
            "tensor_parallel_size": 4,
        },
        env={"NCCL_P2P_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        secrets=("HF_TOKEN",),
        vllm_version="0.32.0",
        device_name="NVIDIA RTX A6000",
        device_count=4,
        study="longdoc",
        trial=7,
        measured_at=1_795_000_000.0,
        workload="long documents",
        workload_fingerprint="ab12cd34ef56ab78",
        values=(
            MeasuredValue("ttft_p95_s", 1.234, (1.1, 1.4), 2.468, (2.2, 2.7)),
            MeasuredValue("tpot_p95_s", 0.0612, (0.059, 0.064), 0.058, (0.056, 0.06)),
        ),
        weights_gib=15.3,
        kv_gib=20.0,
        start_s=95.0,
        prefix_caching=False,
    )


def hostile() -> Deployment:
    """Text that every format has to quote, in every place that takes any text."""
    return dataclasses.replace(
        plain(),
        model=HOSTILE,
        args={"additional_config": {HOSTILE: [HOSTILE]}, "served_model_name": [HOSTILE, "1e3"], "tokenizer": HOSTILE},
        env={"A_VARIABLE": HOSTILE},
        secrets=(),
        study=HOSTILE,
        workload=HOSTILE,
    )


def on_cpu(folder: Path) -> Deployment:
    """A model in a folder of the host, on its CPU."""
    changes: dict[str, Any] = {"args": {"max_num_seqs": 4}, "env": {}, "secrets": ()}
    return dataclasses.replace(
        plain(), model=str(folder), model_is_folder=True, device_name="cpu", device_count=0, **changes
    )


def golden(kind: str) -> dict[str, str]:
    """Files of one format, made of the plain deployment."""
    return FORMATS[kind](plain())


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for kind in FORMATS:
        for name, text in golden(kind).items():
            (GOLDEN / f"{kind}.{name}").write_text(text, encoding="utf-8")
