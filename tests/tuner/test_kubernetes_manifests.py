from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from schema_check import schema, unknown_fields, validate

from tuner.cli import parser

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", ["cronjob.yaml", "claims.yaml"])
def test_kubernetes_own_resources_keep_their_schemas(name: str) -> None:
    import kubernetes_validate

    for document in documents(name):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_rayjob_keeps_kuberays_definition_and_names_no_field_that_it_does_not_know() -> None:
    (job,) = documents("rayjob.yaml")

    validate(job, "kuberay-rayjob-v1")
    assert unknown_fields(job, schema("kuberay-rayjob-v1")) == []
    assert job["spec"]["rayClusterSpec"]["authOptions"]["mode"] == "token"


def test_manifests_run_commands_that_the_tuner_knows() -> None:
    (job,), (cron,) = documents("rayjob.yaml"), documents("cronjob.yaml")
    container = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    commands = [shlex.split(job["spec"]["entrypoint"]), container["args"]]

    for program, *words in commands:
        assert program == "tuner"
        assert parser().parse_args(words).until == "07:00"
    assert cron["spec"]["schedule"] == "0 22 * * *"


def test_no_container_has_more_rights_than_a_user() -> None:
    (job,), (cron,) = documents("rayjob.yaml"), documents("cronjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"], cron["spec"]["jobTemplate"]["spec"]]

    for pod in (group["template"]["spec"] for group in groups):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
