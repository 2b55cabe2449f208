"""The commands: parsing and printing, nothing else. What each does lives in the room of its name."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tuner import __version__
from tuner.errors import TunerError

if TYPE_CHECKING:
    from tuner.jobs import JobServer

WATCH_S = 5.0
STUDY_HELP = "a study file, or the name of a study that was run in this folder"
ADDRESS_HELP = "the cluster's dashboard, as http://HOST:8265; left out: Ray's RAY_API_SERVER_ADDRESS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 the call or a file is wrong."""
    parsed = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        command: Callable[[argparse.Namespace], int] = parsed.command
        return command(parsed)
    except TunerError as error:
        if parsed.debug:
            raise
        for line in str(error).splitlines():
            print(f"tuner: {line}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("tuner: stopped; `tuner run` goes on with the study where it was", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def _terminate(_: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        prog="tuner", description="Finds the vLLM configurations between time to first token and time per output token."
    )
    top.add_argument("--version", action="version", version=f"tuner {__version__}")
    top.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, *, study: bool = True) -> Any:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        if study:
            command.add_argument("study", metavar="STUDY", help=STUDY_HELP)
        return command

    init = add("init", _init, "write a commented study file for a model and this machine", study=False)
    init.add_argument("--model", help="a model's folder or its Hugging Face name")
    init.add_argument("-o", "--output", type=Path, default=Path("study.yaml"), help="file to write (study.yaml)")

    check = add("check", _check, "say everything that can be known before an engine starts")
    check.add_argument("--json", action="store_true", help="print one JSON document")

    memory = add("memory", _memory, "predict the memory of one configuration, item by item")
    memory.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change an engine argument")
    memory.add_argument("--json", action="store_true", help="print one JSON document")

    plan = add("plan", _plan, "predict the study: share of the space that fits, hours, the front on the twin")
    plan.add_argument("--json", action="store_true", help="print one JSON document")

    calibrate = add("calibrate", _calibrate, "fit the twin to measured trials of the study; say how well it predicts")
    calibrate.add_argument("--json", action="store_true", help="print one JSON document")

    run = add("run", _run, "run the study, or go on with it")
    run.add_argument("--fresh", action="store_true", help="put what was measured aside and start over")
    run.add_argument("--trials", type=_positive, help="so many trials in all, those of earlier runs included")
    run.add_argument("--allow-different", action="store_true", help="go on though vLLM is another release")
    run.add_argument("--until", metavar="HH:MM", help="begin no trial that would not end by then")

    attempt = add("try", _try, "have one configuration tried next, also while the study runs")
    attempt.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set an engine argument")

    submit = add("submit", _submit, "run the study as a job on a Ray cluster, or attach to the job that does")
    submit.add_argument("--address", metavar="URL", help=ADDRESS_HELP)
    submit.add_argument("--detach", action="store_true", help="do not wait for it and show what it prints")
    submit.add_argument("--requirements", type=Path, metavar="FILE", help="pinned packages that the job needs")
    submit.add_argument("--fresh", action="store_true", help="put what was measured there aside and start over")
    submit.add_argument("--trials", type=_positive, help="so many trials in all, those of earlier runs included")
    submit.add_argument("--until", metavar="HH:MM", help="begin no trial that would not end by then")

    jobs = add("jobs", _jobs, "list the studies that run, or ran, as jobs on a cluster", study=False)
    jobs.add_argument("--address", metavar="URL", help=ADDRESS_HELP)
    jobs.add_argument("--json", action="store_true", help="print one JSON document")

    for name, act, text in (
        ("logs", _logs, "show what a job printed"),
        ("stop", _stop, "end a job; its trials are closed, and submitting the study again goes on with it"),
    ):
        job = add(name, act, text, study=False)
        job.add_argument("job", metavar="JOB", help="a job, or the study that it runs")
        job.add_argument("--address", metavar="URL", help=ADDRESS_HELP)
        if name == "logs":
            job.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")

    status = add("status", _status, "say how far the study is")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--watch", action="store_true", help="say it again every few seconds until the study ends")

    doctor = add("doctor", _doctor, "check that nothing of the study is lost or left behind, and mend what can be")
    doctor.add_argument("--json", action="store_true", help="print one JSON document")

    front = add("front", _front, "show the front, the reference and every trial")
    form = front.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document")
    form.add_argument("--csv", action="store_true", help="print a row a trial")

    report = add("report", _report, "write the HTML report")
    report.add_argument("-o", "--output", type=Path, help="folder to write to (the study's own)")

    ui = add("ui", _ui, "open MLflow's UI on the store, on 127.0.0.1", study=False)
    ui.add_argument("study", metavar="STUDY", nargs="?", help="open on this study's experiment")
    ui.add_argument("--port", type=_positive, help="port to listen on; a free one by default")

    add("track", _track, "bring MLflow up to date from the ledger")

    export = add("export", _export, "write a deployment of one configuration")
    export.add_argument("--format", required=True, help="vllm, compose, kubernetes, …; a wrong name lists them")
    export.add_argument("--pick", default="knee", help="knee (default), min:METRIC, trial:N, slo:…, weights:…")
    export.add_argument("-o", "--output", type=Path, default=Path("deploy"), help="folder to write to (deploy)")
    export.add_argument("--force", action="store_true", help="overwrite files that are there")
    export.add_argument("--verified", action="store_true", help="refuse a trial that `tuner verify` has not confirmed")
    export.add_argument("--allow-different", action="store_true", help="allow another vLLM or device than measured")

    verify = add("verify", _verify, "measure the pick against vLLM's defaults again, in turns")
    verify.add_argument("--pick", default="knee", help="which trial, as for export")
    verify.add_argument("--rounds", type=_positive, default=8, help="rounds of one measurement each (8)")
    verify.add_argument("--http", action="store_true", help="through `vllm serve` and its API, as it is deployed")
    verify.add_argument("--json", action="store_true", help="print one JSON document")
    return top


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _show(result: Any, *, as_json: bool) -> None:
    """Print a result that is a document and lines for people."""
    if as_json:
        _print_json(result.document())
        return
    for line in result.lines():
        print(line)


def _table(*rows: object) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for row in rows:
        console.print(row)


# Before a study -----------------------------------------------------------------------------------------------------


def _init(call: argparse.Namespace) -> int:
    from tuner.init import write_study_file

    written = write_study_file(call.model, call.output)
    print(f"{written.path}: {written.summary}")
    print(f"next: tuner check {written.path}")
    return 0


def _check(call: argparse.Namespace) -> int:
    from tuner.commands import check

    _show(check(call.study), as_json=call.json)
    return 0


def _memory(call: argparse.Namespace) -> int:
    from tuner.commands import memory

    prediction, changed = memory(call.study, call.set)
    from tuner.memory_model import as_document

    document = as_document(prediction)
    if call.json:
        _print_json(document)
        return 0
    for name, gib in document["per_gpu_gib"].items():
        basis = document["basis"].get(name)
        known = "" if basis is None else f"   {basis['known']}" + _interval(basis["interval"])
        print(f"{name:12} {gib:8.2f} GiB{known}")
    print(f"KV cache holds {document['kv_tokens']:,} tokens; one request of max_model_len needs "
          f"{document['kv_tokens_needed']:,}")  # fmt: skip
    verdict = "fits" if document["fits"] else "does not fit"
    print(f"{changed}{verdict}: violation {document['violation']:+.3f} (0 or less fits); the longest request that fits "
          f"has {prediction.longest_fitting_tokens:,} tokens")  # fmt: skip
    return 0 if document["fits"] else 1


def _interval(ends: Sequence[float]) -> str:
    return "" if ends[0] == ends[1] else f", {ends[0]:.2f} … {ends[1]:.2f}"


def _plan(call: argparse.Namespace) -> int:
    from tuner.plan import plan

    result = plan(call.study, _say)
    if call.json:
        _print_json(result.document())
        return 0
    _table(*result.renderables())
    return 0


def _calibrate(call: argparse.Namespace) -> int:
    from tuner.calibration_report import calibrate

    _show(calibrate(call.study, _say), as_json=call.json)
    return 0


# A study ------------------------------------------------------------------------------------------------------------


def _run(call: argparse.Namespace) -> int:
    from rich.console import Console

    from tuner.commands import run
    from tuner.display import Display, front_table
    from tuner.handover import finish
    from tuner.judge import objectives_of
    from tuner.study_file import read
    from tuner.study_folder import find

    file = read(find(call.study))
    console = Console(file=sys.stderr)
    with Display(console, objectives_of(file)) as display:
        ending = run(
            file,
            display,
            fresh=call.fresh,
            trials=call.trials,
            until=call.until,
            allow_different=call.allow_different,
        )
    done = finish(file)
    _table(front_table(done.study, f"{file.spec.study}: front beside the reference"))
    for line in (ending.text, *done.lines):
        print(line)
    return 0 if done.study.front else 1


def _submit(call: argparse.Namespace) -> int:
    from tuner.jobs import JobServer, submit

    options = ["--fresh"] if call.fresh else []
    options += ["--trials", str(call.trials)] if call.trials else []
    options += ["--until", call.until] if call.until else []
    done = submit(call.study, call.address, options, call.requirements)
    if call.detach:
        print(done.id)
        return 0
    began = "runs already and is shown" if done.attached else "begins"
    _say(f"job {done.id} {began}; Ctrl-C leaves it running")
    return _follow(JobServer(call.address), done.id)


def _follow(server: JobServer, job_id: str) -> int:
    def show(text: str) -> None:
        print(text, end="", flush=True)

    try:
        return 0 if server.follow(job_id, show) == "SUCCEEDED" else 1
    except KeyboardInterrupt:
        _say(f"job {job_id} goes on; `tuner logs -f {job_id}` shows it again, `tuner stop {job_id}` ends it")
        return 0


def _jobs(call: argparse.Namespace) -> int:
    from tuner.jobs import JobServer

    jobs = JobServer(call.address).jobs()
    if call.json:
        _print_json([job.document() for job in jobs])
        return 0
    for job in jobs:
        print(job.line)
    return 0


def _logs(call: argparse.Namespace) -> int:
    from tuner.jobs import JobServer

    server = JobServer(call.address)
    job = server.job(call.job)
    if call.follow:
        return _follow(server, job.id)
    sys.stdout.write(server.log(job))
    return 0


def _stop(call: argparse.Namespace) -> int:
    from tuner.jobs import JobServer

    server = JobServer(call.address)
    job = server.job(call.job)
    print(f"{job.id}: {server.stop(job)}")
    return 0


def _try(call: argparse.Namespace) -> int:
    from tuner.injection import inject

    print(inject(call.study, call.set))
    return 0


def _status(call: argparse.Namespace) -> int:
    from tuner.commands import status

    while True:
        result = status(call.study)
        if call.json:
            _print_json(result.document())
            return 0
        if call.watch and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")  # an empty screen, from its upper left corner
        for line in result.lines():
            print(line, flush=call.watch)
        if not call.watch or not result.running:
            return 0
        try:
            time.sleep(WATCH_S)
        except KeyboardInterrupt:  # who watches may stop watching; the study goes on
            return 0


def _doctor(call: argparse.Namespace) -> int:
    from tuner.commands import examined

    result = examined(call.study)
    if call.json:
        _print_json(result.document())
    else:
        for line in result.lines():
            print(line)
    return 0 if result.healthy else 1


def _front(call: argparse.Namespace) -> int:
    from tuner.commands import load
    from tuner.display import front_table, outcome_text
    from tuner.view import front_document

    _, study, _ = load(call.study)
    if call.json:
        _print_json(front_document(study))
        return 0
    if call.csv:
        from tuner.commands import trials_csv

        sys.stdout.write(trials_csv(study))
        return 0
    _table(front_table(study, f"{study.study}: front beside the reference"))
    for trial in study.trials:
        print(f"trial {trial.number:3} {trial.source:24} {outcome_text(trial, study.objectives)}")
    return 0


def _report(call: argparse.Namespace) -> int:
    from tuner.commands import load
    from tuner.report.html import write_report

    _, study, folder = load(call.study)
    into = call.output or folder.path / "report"
    into.mkdir(parents=True, exist_ok=True)
    print(write_report(study, folder.path, into))
    return 0


def _track(call: argparse.Namespace) -> int:
    from tuner.commands import load
    from tuner.opening import tracker_of

    file, _, folder = load(call.study)
    done = tracker_of(file).sync(folder.ledger.history(), folder.path, live=folder.is_running(), final=True)
    print(f"{done.written} trials were brought up to date in experiment {done.experiment_id}")
    return 0


def _ui(call: argparse.Namespace) -> int:
    from tuner.handover import ui

    server = ui(call.study, call.port)
    print(server.url, flush=True)
    return server.serve()


# After a study ------------------------------------------------------------------------------------------------------


def _export(call: argparse.Namespace) -> int:
    from tuner.handover import export

    paths = export(
        call.study,
        format_name=call.format,
        pick_text=call.pick,
        into=call.output,
        force=call.force,
        verified=call.verified,
        allow_different=call.allow_different,
    )
    for path in paths:
        print(path)
    return 0


def _verify(call: argparse.Namespace) -> int:
    from tuner.handover import verify

    _show(verify(call.study, call.pick, call.rounds, over_http=call.http, say=_say), as_json=call.json)
    return 0
