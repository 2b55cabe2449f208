"""The format for Ray Serve against Ray Serve LLM's own models, which take seconds to import."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import export_samples
import pytest
import yaml

from tuner.export import FORMATS
from tuner.export.deployment import Deployment


@pytest.mark.parametrize("sample", [export_samples.plain, export_samples.hostile, export_samples.on_cpu])
def test_ray_serve_accepts_the_application_and_its_model(sample: Callable[..., Deployment], tmp_path: Path) -> None:
    deployed = sample(tmp_path) if sample is export_samples.on_cpu else sample()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.llm import LLMServingArgs
        from ray.serve.schema import ServeDeploySchema

        (text,) = FORMATS["ray-serve"](deployed).values()
        application = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0]
        (config,) = LLMServingArgs.model_validate(application.args).llm_configs

    assert config.model_id == deployed.served_name
    assert config.engine_kwargs == {n: v for n, v in deployed.args.items() if n != "served_model_name"}
