"""The machines that engines run on, as Ray sees them: which are there, what they have, and room that is reserved.

Room is a placement group: it stays reserved while the actor on it is made anew, and two studies on one cluster never
share a GPU, since a group is only made where everything that it asks for is free. A study whose room is taken waits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.engine.accelerators import Gpus, gpus_here
from tuner.errors import PreflightError

LOOK_EVERY_S = 1.0
"""Ray is asked for its nodes at most so often, however many engines want to know."""
TYPE = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster: all that it has, used or not."""

    id: str
    address: str
    cpus: int
    gpus: int
    accelerator_types: frozenset[str]

    @property
    def name(self) -> str:
        """For people, and different for each node."""
        return f"{self.address} ({self.id[:8]})"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one engine gets.

    Parameters
    ----------
    gpus:
        Of all its nodes together; 0 runs on the CPU.
    cpus:
        For the actor: one beside GPUs, all that it computes with where there are none.
    nodes:
        Machines that one engine spans.
    accelerator_type:
        Ray's name; `None` for any, as long as all are of one type.
    """

    gpus: int
    cpus: int = 1
    nodes: int = 1
    accelerator_type: str | None = None

    @property
    def gpus_a_node(self) -> int:
        """GPUs on each of its nodes."""
        return self.gpus // self.nodes

    def fits_on(self, node: Node) -> bool:
        """Whether a node is large enough and of the right type, were nothing else on it."""
        typed = self.accelerator_type is None or self.accelerator_type in node.accelerator_types
        return typed and node.cpus >= self.cpus and node.gpus >= self.gpus_a_node

    def engines_on(self, nodes: list[Node]) -> int:
        """How many engines fit on these nodes, were nothing else on them."""
        able = [node for node in nodes if self.fits_on(node)]
        if self.nodes > 1:
            return len(able) // self.nodes
        return sum(min(n.cpus // self.cpus, n.gpus // self.gpus if self.gpus else n.cpus) for n in able)


class Cluster:
    """The cluster that this process is connected to."""

    def __init__(self, address: str) -> None:
        self.is_local = address == "local"
        self._lock = threading.Lock()
        self._nodes: list[Node] = []
        self._looked_s: float | None = None
        _connect(address)

    def nodes(self) -> list[Node]:
        """Nodes that are alive, as of at most a second ago."""
        with self._lock:
            now_s = time.monotonic()
            if self._looked_s is None or now_s - self._looked_s > LOOK_EVERY_S:
                self._nodes, self._looked_s = _nodes(), now_s
            return list(self._nodes)

    def has(self, node_ids: tuple[str, ...]) -> bool:
        """Whether all of these nodes are alive."""
        return set(node_ids) <= {node.id for node in self.nodes()}


def _connect(address: str) -> None:
    """Join a cluster, or start a local one that listens on loopback only and runs workers at normal priority."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        # Ray's switch for systems where only loopback is wanted; read when Ray is imported.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        options["include_dashboard"] = False
    import ray

    if ray.is_initialized():
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address=address, **options)
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if handler is not None:  # not Python's own
                signal.signal(number, handler)  # Ray's would leave trials that run without ending them or saying so


def _nodes() -> list[Node]:
    import ray

    return [
        Node(
            id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            cpus=int(entry["Resources"].get("CPU", 0)),
            gpus=int(entry["Resources"].get("GPU", 0)),
            accelerator_types=frozenset(k.removeprefix(TYPE) for k in entry["Resources"] if k.startswith(TYPE)),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def gpus_of(cluster: Cluster, accelerator_type: str | None) -> Gpus | None:
    """Look at the GPUs of a node of this type as its own driver reports them, whether they are busy or not."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    able = [
        n for n in cluster.nodes() if n.gpus and (accelerator_type is None or accelerator_type in n.accelerator_types)
    ]
    if not able:
        return None
    there = NodeAffinitySchedulingStrategy(able[0].id, soft=False)
    found: Gpus | None = ray.get(ray.remote(gpus_here).options(num_cpus=0, scheduling_strategy=there).remote())
    return found


def preflight(nodes: list[Node], wanted: Wanted) -> None:
    """Refuse what the cluster can never give, rather than wait for it.

    Raises
    ------
    PreflightError
        With what is there; also for GPUs of several types where the study names none: their trials could not be
        compared.
    """
    types = sorted({name for node in nodes if node.gpus for name in node.accelerator_types})
    if wanted.accelerator_type and not any(wanted.accelerator_type in node.accelerator_types for node in nodes):
        raise PreflightError(
            f"Ray sees no accelerator of type {wanted.accelerator_type} (resources.accelerator_type); it sees "
            f"{', '.join(types) or 'none'}"
        )
    if not wanted.engines_on(nodes):
        there = ", ".join(f"{node.name}: {node.gpus} GPUs" for node in nodes)
        span = f" over {wanted.nodes} nodes (resources.nodes_per_engine)" if wanted.nodes > 1 else ""
        raise PreflightError(
            f"the study asks for {wanted.gpus} GPUs (resources.gpus_per_engine){span} and {wanted.cpus} CPUs for an "
            f"engine, Ray sees {there or 'no node'}; correct the study or run it on machines that have them"
        )
    if wanted.gpus and wanted.accelerator_type is None and len(types) > 1:
        raise PreflightError(
            f"Ray sees GPUs of several types, {', '.join(types)}; name one under resources.accelerator_type, since "
            "trials on different GPUs cannot be compared"
        )


class Room:
    """Resources reserved for one engine, and where they are once they are there."""

    def __init__(self, cluster: Cluster, wanted: Wanted) -> None:
        from ray.util import placement_group

        self.wanted = wanted
        self._cluster = cluster
        self.nodes: tuple[str, ...] = ()
        self._group: Any = placement_group(**_reservation(cluster.nodes(), wanted))

    def is_ready(self) -> bool:
        """Whether the resources are there; a group that waits is asked for again."""
        from ray.util import placement_group_table

        if not self.nodes:
            row = placement_group_table(self._group)
            if row.get("state") == "CREATED":
                by_bundle: Mapping[int, str] = row["bundles_to_node_id"]
                self.nodes = tuple(dict.fromkeys(by_bundle[index] for index in sorted(by_bundle)))
        return bool(self.nodes)

    @property
    def can_leave(self) -> bool:
        """Whether its machines may leave; one that this process started ends with it."""
        return not self._cluster.is_local

    def is_there(self) -> bool:
        """Whether its machines are alive."""
        return self._cluster.has(self.nodes)

    def options(self) -> dict[str, Any]:
        """Return what puts an actor there; the workers of one that spans nodes take the GPUs themselves."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spans = self.wanted.nodes > 1
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=0, placement_group_capture_child_tasks=spans
        )
        gpus = 0 if spans else self.wanted.gpus
        return {"num_cpus": self.wanted.cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def free(self) -> None:
        """Give the resources back."""
        from ray.util import remove_placement_group

        remove_placement_group(self._group)


def _reservation(nodes: list[Node], wanted: Wanted) -> dict[str, Any]:
    """Return the arguments of Ray's placement group.

    One bundle, which never leaves its node, for an engine on one machine. vLLM's Ray executor wants a bundle a GPU, so
    an engine that spans machines names them: those of the right type with the most GPUs.
    """
    typed = {f"{TYPE}{wanted.accelerator_type}": 0.001} if wanted.accelerator_type else {}
    gpu = {"GPU": wanted.gpus} if wanted.gpus else {}
    if wanted.nodes == 1:
        return {"bundles": [{"CPU": wanted.cpus, **gpu, **typed}], "strategy": "STRICT_PACK"}
    chosen = sorted((n for n in nodes if wanted.fits_on(n)), key=lambda n: -n.gpus)[: wanted.nodes]
    places = [node.id for node in chosen for _ in range(wanted.gpus_a_node)]
    bundles: list[dict[str, float]] = [{"GPU": 1, **typed} for _ in places]
    bundles[0]["CPU"] = wanted.cpus
    return {
        "bundles": bundles,
        "strategy": "PACK",
        "bundle_label_selector": [{"ray.io/node-id": node_id} for node_id in places],
    }
