"""A night in small: a study of the real engine with a deadline, disturbed again and again, that must end in time.

The study has `--until` some minutes from now. What is struck, and when, is drawn from the seed: the driver, the actor,
the engine core or Ray's processes are killed, everything is killed at once, the driver is told to stop, the engine is
stopped in the middle (SIGSTOP), half the CPU is taken, the ledger's last line is torn. A driver that died is started
again, as systemd would. At the end: did it end by its deadline, is every member of the front confirmed, is anything
lost, doubled or left behind, and what does `tuner doctor` say.

    PYTHONPATH=. python benchmarks/night.py [--minutes 20] [--faults 10] [--seed 1]

Exit status 0 when all of it held. What happened is kept in benchmarks/data/chaos/night.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import named
from chaos_scene import Command, Scene, check

KEPT = Path(__file__).parent / "data" / "chaos" / "night.json"
STOP_S = 60.0
"""The deadline is met when the driver is gone this much after it: the stop of an engine, and MLflow's last figures."""
QUIET_SHARE = 0.75
"""Faults strike in this first part of the night; the rest is for what is to be shown: the front confirmed in time."""
SPACE = {"max_num_seqs": [1, 2, 4, 8, 16], "max_num_batched_tokens": [64, 256, 1024, 2048]}
CPU_S = 45.0


def _kill(scene: Scene, *names: str) -> str:
    victims = named(scene, *names)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return f"{len(victims)} processes killed"


def _driver(scene: Scene, number: int) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(scene.sessions[-1], number)
    return f"signal {number} to the driver"


def _everything(scene: Scene) -> str:
    victims = scene.processes()
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return f"{len(victims)} processes killed"


def _suspend(scene: Scene) -> str:
    victims = named(scene, "EngineCor")
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    return f"{len(victims)} processes stopped"


def _busy(_: Scene) -> str:
    subprocess.Popen(["timeout", str(CPU_S), sys.executable, "-c", "while True: pass"])
    return f"one core taken for {CPU_S:.0f} s"


def _tear(scene: Scene) -> str:
    said = _driver(scene, signal.SIGKILL)
    time.sleep(0.5)
    with scene.ledger.open("ab") as ledger:
        ledger.write(b'{"kind":"trial","record":{"number":')
    return f"{said}, half a line appended"


FAULTS: dict[str, Callable[[Scene], str]] = {
    "driver killed": lambda scene: _driver(scene, signal.SIGKILL),
    "driver told to stop": lambda scene: _driver(scene, signal.SIGTERM),
    "actor killed": lambda scene: _kill(scene, "ray::EngineHost"),
    "engine core killed": lambda scene: _kill(scene, "EngineCor"),
    "raylet killed": lambda scene: _kill(scene, "raylet/raylet"),
    "Ray's head killed": lambda scene: _kill(scene, "gcs_server"),
    "power cut": _everything,
    "engine stopped": _suspend,
    "half the CPU taken": _busy,
    "ledger torn": _tear,
}


def schedule(rng: random.Random, minutes: float, count: int) -> list[tuple[float, str]]:
    """When what strikes: seconds from the start, in order; every kind once before any a second time."""
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += rng.sample(list(FAULTS), len(FAULTS))
    times = sorted(rng.uniform(30.0, QUIET_SHARE * 60 * minutes) for _ in range(count))
    return list(zip(times, kinds[:count], strict=True))


def supervise(scene: Scene, until: str, deadline: float, faults: list[tuple[float, str]]) -> dict[str, Any]:
    """Run the study as a service until it ends by itself or its time is long over."""
    began = time.time()
    log: list[dict[str, Any]] = []
    driver: Command = scene.start("--until", until)
    seen: dict[int, Any] = {}
    while time.time() < deadline + 5 * STOP_S:
        time.sleep(0.5)
        seen |= {record["number"]: record for record in scene.ends()}
        if faults and time.time() - began > faults[0][0]:
            _, kind = faults.pop(0)
            log.append({"at_s": round(time.time() - began), "fault": kind, "what": FAULTS[kind](scene)})
            print(log[-1], file=sys.stderr, flush=True)
        status = driver.poll()
        if status is None:
            continue
        log.append({"at_s": round(time.time() - began), "driver": status})
        print(log[-1], file=sys.stderr, flush=True)
        if status == 0 or time.time() >= deadline:
            break
        driver = scene.start("--until", until)
    return {"log": log, "ended_s": time.time() - deadline, "seen": list(seen.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scene = Scene.make(Path(tempfile.mkdtemp(prefix="night-")), "real", options.seed, 60.0, None)
    scene.write(
        space=SPACE,
        budget={"hours": options.minutes / 30},
        confirm={"rounds": 1},
        noise={"aa_runs": 1, "sentinel_every": 0},
        search={"seed": options.seed},
    )
    deadline = -(-(time.time() + 60 * options.minutes) // 60) * 60  # the next whole minute
    until = datetime.fromtimestamp(deadline).astimezone().strftime("%H:%M")
    planned = schedule(random.Random(options.seed), options.minutes, options.faults)
    night = supervise(scene, until, deadline, planned)
    invariants = check(scene, night.pop("seen"), None)
    records = {record["number"]: record for record in scene.ends()}
    front = scene.facts["front"]
    confirmed = [n for n in front if any(r["source"] == "confirm" and r["repeats"] == n for r in records.values())]
    states: dict[str, int] = {}
    for record in records.values():
        states[record["state"]] = states.get(record["state"], 0) + 1
    held = {
        "ended by its deadline": night["ended_s"] <= STOP_S,
        "front": bool(front),
        "front confirmed": bool(front) and confirmed == front,
        "invariants": invariants.holds,
    }
    document = {
        "seed": options.seed, "minutes": options.minutes, "faults": options.faults, **night, "trials": states,
        "front": front, "confirmed": confirmed, "invariants": asdict(invariants), "held": held,
    }  # fmt: skip
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(document, indent=1) + "\n")
    for name, value in (
        *held.items(),
        ("trials", states),
        ("front", front),
        ("after the deadline, s", night["ended_s"]),
    ):
        print(f"{name:24} {value}")
    print(f"{invariants}\nfolder: {scene.folder}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
