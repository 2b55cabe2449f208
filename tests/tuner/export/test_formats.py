"""Each format against its real reader or schema, with plain and with hostile text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_samples
import jsonschema
import pytest
import yaml
from export_samples import HOSTILE
from schema_check import schema, unknown_fields, validate

from tuner.export import FORMATS
from tuner.export.arguments import command_line
from tuner.export.deployment import Deployment

CASES: dict[str, Callable[[Path], Deployment]] = {
    "plain": lambda _: export_samples.plain(),
    "hostile": lambda _: export_samples.hostile(),
    "on_cpu": lambda folder: export_samples.on_cpu(folder),
}


@pytest.fixture(params=CASES)
def deployed(request: pytest.FixtureRequest, tmp_path: Path) -> Deployment:
    return CASES[request.param](tmp_path)


def documents(kind: str, deployed: Deployment) -> list[Any]:
    """YAML documents of the only file of a format."""
    (text,) = FORMATS[kind](deployed).values()
    return list(yaml.safe_load_all(text))


def expected_words(deployed: Deployment) -> list[str]:
    """Model and arguments that a container's `vllm serve` must receive."""
    if not deployed.model_is_folder:
        return [deployed.model, *command_line(deployed.args)]
    return ["/model", *command_line({**deployed.args, "served_model_name": Path(deployed.model).name})]


def filled_in_by_kubernetes(text: str) -> str:
    """What Kubernetes makes of a word when no variable of that name exists: `$$` is a dollar."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda m: "$" if m[1] == "$" else m[0], text)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_files_are_those_of_the_golden_folder(kind: str) -> None:
    for name, text in export_samples.golden(kind).items():
        assert text == (export_samples.GOLDEN / f"{kind}.{name}").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_file_says_where_it_comes_from(kind: str) -> None:
    for text in export_samples.golden(kind).values():
        for fact in ("longdoc, trial 7", "2026-11-18", "RTX A6000", "ab12cd34ef56ab78", "1.234", "2.468", "0.32.0"):
            assert fact in text


@pytest.mark.parametrize("kind", FORMATS)
def test_no_text_of_the_study_leaves_its_comment(kind: str) -> None:
    for text in FORMATS[kind](export_samples.hostile()).values():
        body = [line for line in text.splitlines() if not line.startswith("#")]
        assert not any("(touch hacked)`id`" in line and line.startswith("Study") for line in body)
        assert not any(line.startswith("end: -") for line in body if kind != "vllm")


def test_compose_validates_and_interpolates_to_the_words(deployed: Deployment) -> None:
    (document,) = documents("compose", deployed)
    service = document["services"]["vllm"]

    validate(document, "compose-spec", jsonschema.Draft7Validator)
    assert [re.sub(r"\$\$", "$", word) for word in service["command"]] == expected_words(deployed)
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", "".join(service["command"]))
    assert ("deploy" in service) is (deployed.device_count > 0)


def test_compose_takes_a_secret_from_the_callers_environment() -> None:
    (document,) = documents("compose", export_samples.plain())

    assert document["services"]["vllm"]["environment"]["HF_TOKEN"] == "${HF_TOKEN:?set HF_TOKEN first}"


def test_kubernetes_validates_and_runs_the_words(deployed: Deployment) -> None:
    import kubernetes_validate

    found = documents("kubernetes", deployed)
    for document in found:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    (container,) = found[1]["spec"]["template"]["spec"]["containers"]

    assert [d["kind"] for d in found] == ["PersistentVolumeClaim", "Deployment", "Service"]
    assert [filled_in_by_kubernetes(word) for word in container["args"]] == expected_words(deployed)


def test_kubernetes_limits_the_gpus_and_shares_memory() -> None:
    found = documents("kubernetes", export_samples.plain())
    pod = found[1]["spec"]["template"]["spec"]

    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_kserve_validates_against_its_resource_definitions(deployed: Deployment) -> None:
    runtime, service = documents("kserve", deployed)
    container = runtime["spec"]["containers"][0]
    model = service["spec"]["predictor"]["model"]

    validate(runtime, "kserve-servingruntime-v1alpha1")
    validate(service, "kserve-inferenceservice-v1beta1")
    assert model["runtime"] == runtime["metadata"]["name"]
    assert container["image"] == deployed.image
    untemplated = [word.replace("{{`{{`}}", "{{") for word in model["args"]]
    assert [filled_in_by_kubernetes(word) for word in untemplated] == expected_words(deployed)


def test_kserves_definitions_leave_no_field_of_ours_unknown(deployed: Deployment) -> None:
    runtime, service = documents("kserve", deployed)

    assert unknown_fields(runtime, schema("kserve-servingruntime-v1alpha1")) == []
    assert unknown_fields(service, schema("kserve-inferenceservice-v1beta1")) == []


def test_production_stack_values_validate_and_are_all_known(deployed: Deployment) -> None:
    (values,) = documents("production-stack", deployed)

    validate(values, "production-stack-values")
    assert unknown_fields(values, schema("production-stack-values")) == []


def test_production_stack_says_every_argument_once() -> None:
    (values,) = documents("production-stack", export_samples.plain())
    config = values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]
    said_by_the_chart = ["--no-enable-prefix-caching", f"--tensor-parallel-size={config['tensorParallelSize']}"]

    assert config["enablePrefixCaching"] is False
    assert sorted(config["extraArgs"] + said_by_the_chart) == sorted(command_line(export_samples.plain().args))


def test_production_stack_keeps_prefix_caching_on_where_it_was() -> None:
    """The chart would switch it off in silence."""
    import dataclasses

    deployed = dataclasses.replace(export_samples.plain(), args={}, prefix_caching=True)
    (values,) = documents("production-stack", deployed)

    assert values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["enablePrefixCaching"] is True


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_verifies_the_unit(deployed: Deployment, tmp_path: Path) -> None:
    ((name, text),) = FORMATS["systemd"](deployed).items()
    (tmp_path / name).write_text(text)

    done = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True, timeout=60)

    assert (done.returncode, [line for line in done.stderr.splitlines() if name in line]) == (0, [])


def test_systemd_starts_the_words(deployed: Deployment) -> None:
    (text,) = FORMATS["systemd"](deployed).values()
    (command,) = [line.removeprefix("ExecStart=") for line in text.splitlines() if line.startswith("ExecStart=")]

    assert as_systemd_reads(command) == ["/usr/bin/env", "vllm", "serve", deployed.model, *command_line(deployed.args)]


def test_the_shell_line_hands_over_the_very_words(deployed: Deployment, tmp_path: Path) -> None:
    """Run by a real shell, with a `vllm` on the path that prints what it was given."""
    files = FORMATS["vllm"](deployed)
    script = tmp_path / f"{deployed.name}.sh"
    script.write_text(files[script.name])
    (tmp_path / "vllm").write_text('#!/bin/sh\nprintf "%s\\0" "$@" "${A_VARIABLE-}"\n')
    (tmp_path / "vllm").chmod(0o755)

    done = subprocess.run(
        ["sh", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_TOKEN": "x"},
        cwd=tmp_path,
        capture_output=True,
        timeout=30,
        check=True,
    )

    said = done.stdout.decode().split("\0")[:-1]
    assert said == ["serve", deployed.model, *command_line(deployed.args), deployed.env.get("A_VARIABLE", "")]
    assert not (tmp_path / "hacked").exists()


def test_the_shell_line_asks_for_a_missing_secret(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(FORMATS["vllm"](export_samples.plain())["longdoc-trial-7.sh"])

    done = subprocess.run(["sh", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=30)

    assert done.returncode != 0
    assert "set HF_TOKEN first" in done.stderr


def test_json_holds_the_command_and_every_value(deployed: Deployment) -> None:
    (text,) = FORMATS["json"](deployed).values()
    document = json.loads(text)

    assert document["command"] == ["vllm", "serve", deployed.model, *command_line(deployed.args)]
    for one in deployed.values:
        assert (document["values"][one.name]["value"], document["values"][one.name]["reference"]) == (
            one.value,
            one.reference,
        )


@pytest.mark.parametrize("kind", FORMATS)
def test_no_format_forgets_a_variable(kind: str) -> None:
    for text in FORMATS[kind](export_samples.hostile()).values():
        assert "A_VARIABLE" in text


def as_systemd_reads(command: str) -> list[str]:
    """Words of an ExecStart line by systemd.syntax(7): C escapes in double quotes, `%%` and `$$` as one."""
    escape = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', command)
    plain = [re.sub(r"\\(.)", lambda m: escape[m[1]], w[1:-1]) if w.startswith('"') else w for w in words]
    return [w.replace("%%", "%").replace("$$", "$") for w in plain]


def test_the_hostile_text_is_hostile_to_all() -> None:
    for danger in (" ", "'", '"', "$(", "`", "${", "\\", "%", "{{", "\n", "#", ": "):
        assert danger in HOSTILE
