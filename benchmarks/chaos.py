"""What survives what: faults × runs on studies that are then resumed, and what must hold afterwards. Seeded, resumable.

Each run makes a study of its own, strikes at a moment that its seed draws, goes on with `tuner run` until the budget is
used up, and counts from the raw files: finished trials that are gone or changed (lost), trials finished twice
(doubled), processes and shared memory that are left, MLflow's runs that are open, missing or too many, proposals other
than an undisturbed study's, invalid trials on the front, tracebacks; and asks `tuner doctor`.

    PYTHONPATH=. python benchmarks/chaos.py --engine twin [--seconds 100] [--only "power cut"] [--again]
    PYTHONPATH=. python benchmarks/chaos.py --engine real --seconds 140
    PYTHONPATH=. python benchmarks/chaos.py --table [--markdown]

Results are kept in benchmarks/data/chaos/results.jsonl: a call goes on with the runs that are missing there until its
seconds are used up. Faults of a full disk mount a small tmpfs, which takes root. Exit status 1 when anything broke.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS, Fault
from chaos_scene import PATIENCE_S, Forked, Scene, check, signature

RESULTS = Path(__file__).parent / "data" / "chaos" / "results.jsonl"
REAL_S = 40.0
"""What the study of the real engine takes undisturbed: one trial of about 30 s, and Ray."""
RESUMES = 3
"""So many times `tuner run` is called after a fault: it may end with status 1 while what was broken is mended."""


def seed_of(kind: str, index: int) -> int:
    """Return a seed that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{kind} {index}".encode()).digest()[:4], "little")


def results() -> list[dict[str, Any]]:
    """Everything that was run so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def preload() -> None:
    """Import what a twin study needs, once for all runs."""
    import optuna  # noqa: F401
    import pandas  # noqa: F401

    import tuner.cli
    import tuner.doctor
    import tuner.engine.twin.engine
    import tuner.engine.twin.vllm_scheduler
    import tuner.handover
    import tuner.opening
    import tuner.watching  # noqa: F401


def undisturbed(work: Path) -> tuple[dict[int, tuple[Any, ...]], float, Path]:
    """Run a study that nothing happens to: its proposals, its seconds, and the store that MLflow laid out for it."""
    template = work / "mlflow.db"
    laid_out = Forked(work, ("--version",), before=lambda: _lay_out(template))
    laid_out.wait(2 * PATIENCE_S)
    scene = Scene.make(work / "undisturbed", "twin", 0, 30.0, template)
    began_s = time.monotonic()
    status = scene.run()
    assert status == 0, f"the undisturbed study ended with status {status}:\n{scene.output()[-2000:]}"
    return {r["number"]: signature(r) for r in scene.ends()}, time.monotonic() - began_s, template


def _lay_out(template: Path) -> None:
    from tuner.tracking.store import Store

    Store(f"sqlite:///{template}", template.parent / "artifacts").experiment("nothing")


def run(kind: str, fault: Fault, index: int, work: Path, base: tuple[Any, float, Path | None]) -> dict[str, Any] | None:
    """Provoke a fault once, resume, and count.

    With the real engine both take minutes: the first call strikes, and returns `None`; the next one resumes.
    """
    expected, usual_s, template = base
    folder = work / f"{list(FAULTS).index(kind)}-{index}"
    struck = folder / "struck.json"
    row: dict[str, Any] = {"kind": kind, "engine": fault.engine, "index": index}
    began_s = time.monotonic()
    broken, invariants = "", None
    if struck.exists():
        scene = Scene.again(folder, struck)
    else:
        scene = Scene.make(folder, fault.engine, seed_of(kind, index), usual_s, template)
    try:
        if not struck.exists():
            fault.strike(scene)
            scene.remember(struck)
            if fault.engine == "real":
                return None
        seen = json.loads(struck.read_text())["seen"]
        for _ in range(RESUMES):
            status = scene.run(limit_s=6 * PATIENCE_S if fault.engine == "real" else 0.0)
            if status == 0:
                break
        assert status == 0, f"resumed, it ended with status {status}"
        invariants = check(scene, seen, expected)
        row["trials"] = len(scene.ends())
    except AssertionError as error:
        broken = str(error)
    finally:
        _clear(scene)
    holds = invariants is not None and invariants.holds and not broken
    row |= {"ok": holds, "broken": broken, "seconds": round(time.monotonic() - began_s, 1), "facts": scene.facts}
    row["invariants"] = None if invariants is None else asdict(invariants)
    if holds:
        shutil.rmtree(folder)
    else:
        row["output"] = scene.output()[-1500:]
    return row


def _clear(scene: Scene) -> None:
    for process in scene.processes():
        with contextlib.suppress(Exception):
            os.kill(process.pid, signal.SIGKILL)


def table(rows: list[dict[str, Any]], markdown: bool) -> str:
    """Show a row a kind: runs, those in which everything held, and the sums of what did not."""
    names = ["lost", "doubled", "orphans", "segments", "open_runs", "mlflow_wrong", "other_proposals", "tracebacks"]
    head = ["fault", "engine", "runs", "held", *(n.replace("_", " ") for n in names), "mended by doctor"]
    lines = [head] + ([["---"] * 2 + ["---:"] * (len(head) - 2)] if markdown else [])
    for kind, fault in FAULTS.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            sums = [sum((row["invariants"] or {}).get(n, 0) for row in of_kind) for n in names]
            mended = sum((row["invariants"] or {}).get("mended", 0) for row in of_kind)
            held = sum(row["ok"] for row in of_kind)
            lines.append([kind, fault.engine, *map(str, (f"{len(of_kind)} of {fault.runs}", held, *sums, mended))])
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["twin", "real"], default="twin")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further run after so many")
    parser.add_argument("--only", help="one kind of fault")
    parser.add_argument("--again", action="store_true", help="run those again in which something broke")
    parser.add_argument("--table", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--work", type=Path, help="folder for the studies; those that broke are left there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended with this
    rows = results()
    if not options.table:
        rows = go_on(options, rows)
    print(table(rows, options.markdown))
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} runs held; "
          f"{sum(f.runs for f in FAULTS.values()) - len(rows)} are still to be run")  # fmt: skip
    return 0 if all(row["ok"] for row in rows) else 1


def go_on(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run what is missing, until the time is used up, and return everything."""
    began_s = time.monotonic()
    if options.again:
        rows = [row for row in rows if row["ok"]]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {(row["kind"], row["index"]) for row in rows}
    missing = [
        (kind, index)
        for kind, fault in FAULTS.items()
        for index in range(fault.runs)
        if fault.engine == options.engine and options.only in (None, kind) and (kind, index) not in done
    ]
    missing.sort(key=lambda run: run[1])  # each kind once before any a second time
    missing = [run for run in missing for _ in range(2 if options.engine == "real" else 1)]
    if not missing:
        return rows
    work = options.work or Path(tempfile.gettempdir()) / f"tuner-chaos-{options.engine}"
    work.mkdir(parents=True, exist_ok=True)
    base: tuple[Any, float, Path | None] = (None, REAL_S, None)
    if options.engine == "twin":
        preload()
        base = undisturbed(work)
        print(f"an undisturbed study: {len(base[0])} trials in {base[1]:.1f} s", file=sys.stderr, flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for kind, index in missing:
        if time.monotonic() - began_s > options.seconds:
            break
        row = run(kind, FAULTS[kind], index, work, base)
        if row is None:
            print(f"{kind} {index}: struck; the next call resumes", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = "held" if row["ok"] else f"BROKE: {row['broken'] or row['invariants']}"
        print(f"{kind} {index}: {said} ({row['seconds']} s)", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
