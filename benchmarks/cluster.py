"""Whether a study on a cluster that loses and gains machines loses or doubles a trial, and the driver keeps up.

Ray's own cluster utilities start the machines on this one; every engine is an actor in a room of its own, driven by the
code that drives vLLM. The actors predict with the twin, a few of which serve all, and stay busy for as long as a trial
at the asked pace would take. Ideal time is taken from the seats that there were at each moment; the idle share from
those until the last trial began, since nobody has anything to do for a seat that becomes free after that. It is said
for the whole, in which nothing runs beside the reference and then every engine has to be given its first trial, and for
what comes after that.

    python benchmarks/cluster.py --trials 500 --nodes 4 --engines-per-node 2 --trial-s 4 --kill 2 --join 1
    python benchmarks/cluster.py --trials 1280 --nodes 8 --engines-per-node 8 --trial-s 60 --storage postgresql://…
    python benchmarks/cluster.py --folder DIR …       goes on with a study that was ended in the middle
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from objectives.measurement import EngineFacts, Failure, Measurement
from tuner import opening
from tuner.config import EngineConfig
from tuner.engine.cluster import Wanted
from tuner.engine.host import HostIdentity, StopReport
from tuner.engine.nvml import Device
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import MeasurePlan
from tuner.engine.ray_pool import RayEnginePool
from tuner.ledger import History, TrialRecord, TrialState
from tuner.night import candidates, is_open
from tuner.proposal import Proposal
from tuner.study import StudyRun
from tuner.study_file import StudyFile, read
from tuner.study_folder import StudyFolder
from tuner.workload.model import Workload

EXAMPLE = Path(__file__).parents[1] / "examples" / "a6000-qwen32b-longdoc.yaml"
GPUS = 4
"""Of one engine; the cluster's GPUs are made up, and only their numbers matter."""
TWIN = "twin-{}"
SMALL = {"object_store_memory": 80 * 2**20}
SPREAD = 0.5
"""Trials take the asked pace give or take so much of it, by their configuration."""


class Twin:
    """One twin that predicts for many engines; its imports of vLLM are what is slow about it."""

    def __init__(self, study: str) -> None:
        from tuner.engine.twin.devices import find_device

        file = read(Path(study))
        device = find_device("a6000")
        machine = opening.machine_of(file)
        memory = opening.memory_predictor(file, machine, lambda: History(None, (), (), ()))
        self._engine = opening.make_twin(file, device, memory)
        workload = opening.build_workload(file, file.folder / "mlruns").workload
        self.predict(opening.base_config(file), workload, MeasurePlan())  # imports vLLM's scheduler, half a minute here

    def predict(self, config: EngineConfig, workload: Workload, plan: MeasurePlan) -> Measurement | Failure:
        """Predict one trial."""
        return self._engine.run(config, workload, plan, lambda _: None)


def nominal_s(config: EngineConfig, trial_s: float) -> float:
    """How long a trial of this configuration takes at this pace."""
    return trial_s * (1 + SPREAD * (2 * (int(config.key(), 16) % 1000) / 999 - 1))


class TwinHost:
    """What stands behind an actor here instead of `EngineHost`: the same methods, and a twin that does the work."""

    twins = 1
    trial_s = 1.0

    def __init__(self, driver: ProcessIdentity, driver_machine: str, cores: tuple[int, int] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="twin-host-"))
        self._config = EngineConfig()
        self._began_s = 0.0

    async def identity(self) -> HostIdentity:
        """Say who this is."""
        devices = tuple(Device(f"GPU-{i}", "NVIDIA RTX A6000", i) for i in range(GPUS))
        return HostIdentity(socket.gethostname(), ProcessIdentity.of(os.getpid()), devices, self._folder, {})

    async def state(self) -> str:
        """Say what is done."""
        return "run 1/1"

    async def start(self, config: EngineConfig, log_path: Path | None) -> EngineFacts:
        """Take in the configuration."""
        self._config, self._began_s = config, time.monotonic()
        return EngineFacts("twin", "0", "a6000", GPUS, "model", 0.0)

    async def measure(self, workload: Workload, plan: MeasurePlan) -> Measurement:
        """Have it predicted, and take as long as the trial would."""
        import ray

        twin = ray.get_actor(TWIN.format(int(self._config.key(), 16) % self.twins))
        outcome: Measurement = await twin.predict.remote(self._config, workload, plan)
        await asyncio.sleep(max(0.0, self._began_s + nominal_s(self._config, self.trial_s) - time.monotonic()))
        return outcome

    async def stop(self, budget_s: float) -> StopReport:
        """Nothing to stop."""
        return StopReport(0.0, ())


class Machines:
    """Machines of a made-up cluster, all on this one; the first has the twins, the others engines."""

    def __init__(self, nodes: int, engines_per_node: int) -> None:
        from ray.cluster_utils import Cluster

        self._engines = engines_per_node
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, **SMALL}
        )
        self._nodes = [self._add() for _ in range(nodes)]
        self.seats: list[tuple[float, int]] = []
        """Since when there has been room for how many engines."""

    def _count(self) -> None:
        self.seats.append((time.monotonic(), len(self._nodes) * self._engines))

    def begin(self) -> None:
        """Count from now on."""
        self.seats.clear()
        self._count()

    def seat_s(self, until_s: float) -> float:
        """Seconds of all seats together until a reading of `time.monotonic`."""
        ends = [at for at, _ in self.seats[1:]] + [until_s]
        return sum(
            max(0.0, count * (min(end, until_s) - at)) for (at, count), end in zip(self.seats, ends, strict=True)
        )

    @property
    def address(self) -> str:
        """Where the cluster is."""
        return str(self._cluster.address)

    def _add(self) -> Any:
        return self._cluster.add_node(
            num_cpus=self._engines,
            num_gpus=GPUS * self._engines,
            resources={"accelerator_type:RTX-A6000": 1},
            **SMALL,
        )

    def join(self) -> None:
        """Have one more machine."""
        self._nodes.append(self._add())
        self._count()

    def kill(self) -> None:
        """Lose the machine that has been there longest, without a word."""
        self.seats.append((time.monotonic(), (len(self._nodes) - 1) * self._engines))
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def close(self) -> None:
        """End them all."""
        self._cluster.shutdown()


class Events:
    """A listener that lets machines die and join when so many trials have ended."""

    def __init__(self, machines: Machines, planned: dict[int, str], engines: int) -> None:
        self._machines = machines
        self._planned = planned
        self._without_trial = engines
        self.happened: list[str] = []
        self.last_began = (0.0, 0.0)
        """When the latest trial began, by `time.monotonic` and by the clock."""
        self.all_have_one = (0.0, 0.0)
        """The same of the moment when as many had begun as there are engines."""

    def began(self, proposal: Proposal, of_trials: int | None, ends_at: float | None) -> None:
        """Remember when."""
        self.last_began = (time.monotonic(), time.time())
        self._without_trial -= 1
        if self._without_trial == 0:
            self.all_have_one = self.last_began

    def progressed(self, number: int, text: str) -> None:
        """Nothing to show."""

    def finished(self, record: TrialRecord, history: History) -> None:
        """Count, and let happen what is due."""
        over = len(history.finished)
        for due in [n for n in self._planned if n <= over]:
            what = self._planned.pop(due)
            self.happened.append(f"{what} after {over} trials")
            if what == "kill":  # beside the loop, which must not wait until Ray has noticed
                threading.Thread(target=self._machines.kill, daemon=True).start()
            else:  # Ray starts a machine on the main thread only: the loop stands still for about two seconds
                self._machines.join()
        if over % 25 == 0:
            print(f"{over} trials are over", file=sys.stderr, flush=True)

    def noted(self, text: str) -> None:
        """Show it."""
        print(text, file=sys.stderr, flush=True)


def study_file(folder: Path, arguments: argparse.Namespace) -> StudyFile:
    """Write the study: the 32B example with a short workload, every point of whose space fits into memory."""
    document = yaml.safe_load(EXAMPLE.read_text())
    document |= {
        "study": "cluster",
        "model_config_file": str(EXAMPLE.parent / document["model_config_file"]),
        "engine": {
            "backend": "twin",
            "device": "a6000",
            "args": {"tensor_parallel_size": GPUS, "max_model_len": 8448, "gpu_memory_utilization": 0.94},
        },
        "resources": {"gpus_per_engine": GPUS, "engines": "all"},
        "workload": {
            "kind": "long_documents",
            "prompt_tokens": {512: 6, 2048: 4, 8192: 2},
            "output_tokens": 64,
            "arrivals": {"kind": "poisson", "rate_per_s": 0.5},
        },
        "space": {
            "max_num_seqs": [12, 16, 24, 32, 48, 64, 128],
            "max_num_batched_tokens": {"low": 512, "high": 16384, "log": True},
            "long_prefill_token_threshold": [0, 512, 1024, 2048, 4096],
            "block_size": [16, 32, 64],
            "max_cudagraph_capture_size": [64, 256, 512],
        },
        "recipes": [],
        "budget": {"trials": arguments.trials},
        "search": {"sampler": arguments.sampler, "startup_trials": 16},
        "confirm": {"rounds": 0},
        "gate": {"memory": "off"},
    }
    if arguments.storage:
        document["storage"] = arguments.storage
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return read(path)


@contextmanager
def on_cluster(machines: Machines, arguments: argparse.Namespace, file: StudyFile) -> Iterator[None]:
    """Have studies run on these machines."""
    import ray

    ray.init(address=machines.address, log_to_driver=False, logging_level="ERROR")
    twin = ray.remote(Twin)
    on_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    twins = [twin.options(name=TWIN.format(i), **on_head).remote(str(file.path)) for i in range(arguments.twins)]
    ray.get([t.__ray_ready__.remote() for t in twins])
    host = type("PacedTwinHost", (TwinHost,), {"twins": arguments.twins, "trial_s": arguments.trial_s})

    def make_pool(file: StudyFile, folder: StudyFolder, memory: object) -> RayEnginePool:
        return RayEnginePool(engines=None, wanted=Wanted(gpus=GPUS), address=machines.address, host=host)

    before, opening.make_pool = opening.make_pool, make_pool  # type: ignore[assignment]  # the one thing that is not real
    try:
        yield
    finally:
        opening.make_pool = before
        if ray.is_initialized():
            ray.shutdown()


def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the study, or go on with it, for at most the time that is given; return the figures of this sitting."""
    file = study_file(folder, arguments)
    machines = Machines(arguments.nodes, arguments.engines_per_node)
    done = len(StudyFolder.of("cluster", folder / "mlruns").ledger.history().finished)
    due = [arguments.trials * (i + 1) // (arguments.kill + arguments.join + 1) for i in range(8)]
    what = ["kill"] * arguments.kill + ["join"] * arguments.join
    planned = {n: w for n, w in zip(due, what, strict=False) if n > done}
    events = Events(machines, planned, arguments.nodes * arguments.engines_per_node)
    try:
        with on_cluster(machines, arguments, file):
            store = folder / "mlruns"
            with opening.opened(file, events, fresh=False, store=store) as rooms:
                began_s, cpu_s = time.monotonic(), _cpu_s()
                before = {t.number for t in rooms.folder.ledger.history().finished}
                machines.begin()
                signal.alarm(arguments.limit_s)
                with contextlib.suppress(KeyboardInterrupt):
                    StudyRun(rooms, trials=arguments.trials, deadline=None).run()
                signal.alarm(0)
                wall_s, cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_s
                seat_s, begun_s = machines.seat_s(time.monotonic()), machines.seat_s(events.last_began[0])
                steady_s = begun_s - machines.seat_s(events.all_have_one[0])
                history = rooms.folder.ledger.history()
    finally:
        machines.close()
    mine = [t for t in history.finished if t.number not in before and not is_open(t)]
    work_s = sum(nominal_s(t.config, arguments.trial_s) for t in mine)
    lost_s = sum(a.seconds for t in mine for a in t.attempts)
    return {
        "trials": len(mine), "wall_s": wall_s, "driver_cpu_s": cpu_s, "seat_s": seat_s, "work_s": work_s,
        "begun_s": begun_s, "busy_s": _busy_s(mine, 0.0, events.last_began[1]), "lost_s": lost_s,
        "steady_s": steady_s, "steady_busy_s": _busy_s(mine, events.all_have_one[1], events.last_began[1]),
        "happened": events.happened,
    }  # fmt: skip


def _busy_s(trials: Sequence[TrialRecord], since: float, until: float) -> float:
    """Seconds that engines worked in a span of the clock."""
    ends = [(t.finished_at, t.engine_s) for t in trials if t.finished_at]
    return sum(max(0.0, min(end, until) - max(end - worked_s, since)) for end, worked_s in ends)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def faults(folder: Path, trials: int) -> list[str]:
    """Say in words what is lost or doubled; empty is what is promised."""
    file = read(folder / "cluster.yaml")
    study = StudyFolder.of("cluster", folder / "mlruns")
    history = study.ledger.history()
    told = opening.proposer_of(file, study).told()
    found = [f"{candidates(history)} of {trials} trials count"] if candidates(history) != trials else []
    known = (TrialState.COMPLETE, TrialState.INFEASIBLE)
    found += [f"trial {t.number} is {t.state}" for t in history.trials if t.state not in known]
    own = Counter(t.config.key() for t in history.finished if t.repeats is None)
    found += [f"configuration {key} ran {n} times" for key, n in own.items() if n > 1]
    found += [f"trial {n} is unknown to Optuna" for n in sorted({t.number for t in history.trials} - told.keys())]
    found += [f"Optuna's trial {n} is still open" for n, t in sorted(told.items()) if t.state == "RUNNING"]
    return found


def table(sittings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures of all sittings together, a line each."""
    total = {name: sum(s[name] for s in sittings) for name in sittings[0] if name != "happened"}
    return [
        f"trials                         {total['trials']}",
        f"machines                       {', '.join(w for s in sittings for w in s['happened']) or 'stayed'}",
        f"wall-clock                     {total['wall_s']:.0f} s",
        f"wall-clock / ideal             {total['seat_s'] / total['work_s']:.3f}",
        f"idle share of the engines      {1 - total['busy_s'] / total['begun_s']:.1%}",
        f"once each had its first trial  {1 - total['steady_busy_s'] / max(total['steady_s'], 1e-9):.1%}",
        f"lost with machines             {total['lost_s']:.0f} s",
        f"driver                         {total['driver_cpu_s'] / total['wall_s']:.2f} cores, "
        f"{1000 * total['driver_cpu_s'] / total['trials']:.0f} ms a trial",
    ]


def main() -> int:
    """Run, and print the figures once the study is over."""
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trials", 500), ("nodes", 4), ("engines-per-node", 2), ("kill", 2), ("join", 1)):
        parsed.add_argument(f"--{name}", type=int, default=default)
    parsed.add_argument("--twins", type=int, default=1, help="actors that predict for all")
    parsed.add_argument("--trial-s", type=float, default=4.0, help="seconds of a trial, half as much more or less")
    parsed.add_argument("--sampler", choices=("gp", "tpe", "random"), default="gp")
    parsed.add_argument("--storage", help="PostgreSQL for Optuna, as in a study file")
    parsed.add_argument("--folder", type=Path, help="where the study is kept; given again, it goes on")
    parsed.add_argument("--limit-s", type=int, default=0, help="end the sitting after so many seconds")
    arguments = parsed.parse_args()
    signal.signal(signal.SIGALRM, _stop)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="cluster-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "sittings.jsonl"
    with kept.open("a") as file:
        file.write(json.dumps(run(folder, arguments)) + "\n")
    sittings = [json.loads(line) for line in kept.read_text().splitlines()]
    print("\n".join(table(sittings)))
    found = faults(folder, arguments.trials)
    print("\n".join(found) or "nothing lost, nothing doubled")
    return 1 if found else 0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
