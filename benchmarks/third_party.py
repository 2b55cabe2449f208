"""What a load generator of somebody else says of the defaults and of an exported configuration.

`tuner verify` compares the two with this project's own driver. Here GuideLLM (https://pypi.org/project/guidellm) puts
the study's prompts on both, each served by `vllm serve --config FILE` from the file that `tuner export --format vllm`
wrote for it: text through `/v1/completions`, streaming, Poisson arrivals at the study's rate, which GuideLLM draws and
times itself. The same direction of TTFT and TPOT as verify's is what is promised, not the same figures: GuideLLM draws
other arrivals, and counts TTFT from sending.

GuideLLM needs libraries in versions of its own, hence an environment of its own:

    python -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm==0.8.1
    tuner export STUDY --format vllm --pick trial:0 -o DEPLOY && tuner export STUDY --format vllm -o DEPLOY
    PYTHONPATH=. python benchmarks/third_party.py STUDY.yaml --guidellm /tmp/guidellm/bin/guidellm \
        --default DEPLOY/STUDY-trial-0.yaml --pick DEPLOY/STUDY-trial-9.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tuner.engine.processes import ProcessIdentity, descendants, end_tree
from tuner.engine.server import vllm_command
from tuner.opening import build_workload
from tuner.study_file import StudyFile, read
from tuner.tracking.server import free_port

DATA = Path(__file__).parent / "data" / "third_party.json"
START_S = 300.0
FIGURES = {"time_to_first_token_ms": "TTFT", "inter_token_latency_ms": "TPOT"}
"""GuideLLM's own names of what is compared, per request; its inter-token latency is a request's mean gap, our TPOT."""


def main() -> None:
    options = _options()
    if not options.show:
        sides = {"default": options.default, "pick": options.pick}
        file = read(options.study)
        found: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in sorted(sides, reverse=bool(number % 2)):
                found[side].append(_measure(file, sides[side], options.guidellm, number))
        document = {"guidellm": _version(options.guidellm), "study": file.spec.study, "sides": found}
        options.data.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(options.data.read_text())["sides"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, nargs="?")
    parser.add_argument("--guidellm", type=Path, help="the command")
    parser.add_argument("--default", type=Path, help="exported file of vLLM's defaults")
    parser.add_argument("--pick", type=Path, help="exported file of the choice")
    parser.add_argument("--rounds", type=int, default=1, help="of one measurement each, in turns")
    parser.add_argument("--data", type=Path, default=DATA, help="where the figures are kept")
    parser.add_argument("--show", action="store_true", help="show the figures that were kept, measure nothing")
    return parser.parse_args()


def table(sides: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> str:
    """Show median and p95 of both sides over all requests, and the change from the default to the pick."""
    rows = [f"{'figure':<10}{'default':>12}{'pick':>12}{'change':>10}"]
    for name in FIGURES.values():
        pooled = {side: [v for run in runs for v in run[name]] for side, runs in sides.items()}
        for q in (50, 95):
            default, pick = (percentile(pooled[side], q) for side in ("default", "pick"))
            change = f"{pick / default - 1:+.0%}"
            rows.append(f"{name} p{q:<5}{default:>10.3f} s{pick:>10.3f} s{change:>10}")
    return "\n".join(rows)


def percentile(values: Sequence[float], q: float) -> float:
    """Percentile of some values, between neighbours in proportion."""
    import numpy as np

    return float(np.percentile(values, q))


def _measure(file: StudyFile, config: Path, guidellm: Path, seed: int) -> dict[str, list[float]]:
    """Serve one exported file, load it with GuideLLM, and return the figures of its requests in seconds."""
    with tempfile.TemporaryDirectory(prefix="third-party-") as folder:
        prompts = _write_prompts(file, Path(folder) / "prompts.jsonl")
        report = Path(folder) / "report.json"
        with _served(file, config, Path(folder) / "serve.log") as url:
            command = _command(file, guidellm, url, yaml.safe_load(config.read_text())["model"], prompts, report, seed)
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode or not report.exists():
            raise RuntimeError(f"guidellm ended with {done.returncode}: {done.stderr[-2000:]}")
        return requests_of(json.loads(report.read_text()), prompts)


def _command(file: StudyFile, guidellm: Path, url: str, model: str, prompts: int, report: Path, seed: int) -> list[str]:
    rate = getattr(getattr(file.spec.workload, "arrivals", None), "rate_per_s", 1.0)
    options = {
        "backend": f"kind=openai_http,target={url},model={model},request_format=/v1/completions",
        "tokenizer": "kind=hf_auto",
        "data": f"kind=json_file,path={report.with_name('prompts.jsonl')}",
        "profile": f"kind=poisson,rate={rate}",
        "constraint": f"kind=max_requests,count={prompts}",
        "seed": f"kind=static,value={seed}",
        "output": f"kind=json,path={report}",
    }
    return [str(guidellm), "run", "--disable-console", *(w for n, v in options.items() for w in (f"--{n}", v))]


def _write_prompts(file: StudyFile, path: Path) -> int:
    """Write the study's prompts as text; return how many there are."""
    from transformers import AutoTokenizer

    workload, tokenizer = build_workload(file).workload, AutoTokenizer.from_pretrained(file.model)
    with path.open("w", encoding="utf-8") as lines:
        for request in workload.requests:
            text = tokenizer.decode(list(request.prompt_token_ids))
            lines.write(json.dumps({"prompt": text, "output_tokens_count": request.output_tokens}) + "\n")
    return len(workload.requests)


@contextmanager
def _served(file: StudyFile, config: Path, log_path: Path) -> Iterator[str]:
    """Start `vllm serve --config` as the export says, give its address, and end it."""
    port = free_port()
    command = [vllm_command(), "serve", "--config", str(config), "--host=127.0.0.1", f"--port={port}"]
    env = {**os.environ, **{n: str(v) for n, v in file.spec.engine.env.items()}}
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        itself = ProcessIdentity.of(server.pid)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            end_tree([itself, *descendants(server.pid)], term_s=30)
            server.wait(30)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not come up: {log.read_text(errors='replace')[-2000:]}")


def requests_of(report: Mapping[str, Any], sent: int) -> dict[str, list[float]]:
    """Return the figures of every request that a GuideLLM report has, in seconds.

    GuideLLM 0.8.1 ends as soon as it has sent everything it may, and can leave out a request that is still under way.

    Raises
    ------
    RuntimeError
        When requests failed, or more than one in ten of those sent is missing.
    """
    (benchmark,) = report["benchmarks"]
    failed = len(benchmark["requests"]["errored"])
    done = benchmark["requests"]["successful"]
    if failed or len(done) < 0.9 * sent:
        raise RuntimeError(f"guidellm has {len(done)} of {sent} requests, {failed} of them failed")
    return {name: [request[key] / 1000.0 for request in done] for key, name in FIGURES.items()}


def _version(guidellm: Path) -> str:
    done = subprocess.run([str(guidellm), "--version"], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
