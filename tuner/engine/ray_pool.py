"""The engines of a study on a Ray cluster: one in every room that there is, as machines come and go."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.engine.cluster import LOOK_EVERY_S, Cluster, Room, Wanted, preflight
from tuner.engine.families import Families
from tuner.engine.host import EngineHost
from tuner.engine.processes import ProcessIdentity
from tuner.engine.protocol import Seat
from tuner.engine.ray_engine import RayTrialEngine
from tuner.errors import PreflightError, StudyStoppedError

FIRST_SEAT_S = 600.0
"""What a caller that wants one engine waits for its room: another study may still have it."""


@dataclass(slots=True)
class _Place:
    """A room, and its seat once the room is there."""

    room: Room
    seat: Seat | None = None
    slot: int = 0


class RayEnginePool:
    """An `EnginePool` on the Ray cluster at an address.

    Parameters
    ----------
    engines:
        At most so many at once; `None` for as many as fit.
    wanted:
        What each gets. Without GPUs its CPUs are worked out here: the cores of a machine are dealt out evenly to the
        engines that share it, and none has a core of another.
    address:
        Ray cluster to join; `"local"` starts one for this process, bound to loopback.
    note_processes:
        Called with every process that belongs to these engines, so that a later run can end what a crash leaves.
    host:
        The class behind the actors.

    Raises
    ------
    PreflightError
        When the cluster can never give what one engine needs.
    """

    def __init__(
        self,
        *,
        engines: int | None,
        wanted: Wanted,
        address: str = "local",
        note_processes: Callable[[list[ProcessIdentity]], None] = lambda _: None,
        host: type = EngineHost,
    ) -> None:
        self._cluster = Cluster(address)
        self._families = Families(note_processes)
        self._host = host
        self._engines = engines
        nodes = self._cluster.nodes()
        self._a_machine = 1
        if not wanted.gpus:
            if engines is None:
                raise PreflightError("resources.engines: say how many engines share the CPUs; `all` is for GPUs")
            self._a_machine = math.ceil(engines / max(1, len(nodes)))
            most = max((node.cpus for node in nodes), default=1)
            wanted = dataclasses.replace(wanted, cpus=max(1, most // self._a_machine))
        self._wanted = wanted
        preflight(nodes, wanted)
        self._places: list[_Place] = []
        self._looked_s: float | None = None

    def seats(self) -> Sequence[Seat]:
        """Return the seats whose room is there; rooms are asked for on machines that joined.

        Raises
        ------
        StudyStoppedError
            When the Ray that this process started is gone: nothing can be asked of it any more.
        """
        now_s = time.monotonic()
        if self._looked_s is None or now_s - self._looked_s > LOOK_EVERY_S or not self._places:
            self._looked_s = now_s
            self._look()
        return [place.seat for place in self._places if place.seat is not None and place.room.is_there()]

    def first(self) -> RayTrialEngine:
        """Wait for one engine.

        Raises
        ------
        PreflightError
            When others keep the machines busy for too long.
        """
        deadline_s = time.monotonic() + FIRST_SEAT_S
        while not (seats := self.seats()):
            if time.monotonic() > deadline_s:
                raise PreflightError(f"nothing became free on the cluster within {FIRST_SEAT_S:.0f} s; try again later")
            time.sleep(0.1)
        engine = seats[0].engine
        assert isinstance(engine, RayTrialEngine)
        return engine

    def _look(self) -> None:
        if self._cluster.is_local and not self._cluster.nodes():
            raise StudyStoppedError("Ray on this machine has died; run the study again, it goes on where it was")
        for place in list(self._places):
            if place.room.nodes and not place.room.is_there():
                self._places.remove(place)
                place.room.free()
        fit = self._wanted.engines_on(self._cluster.nodes())
        wanted = fit if self._engines is None else min(self._engines, fit)
        while len(self._places) < wanted:
            self._places.append(_Place(Room(self._cluster, self._wanted)))
        for place in self._places:
            if place.seat is None and place.room.is_ready():
                self._sit(place)

    def _sit(self, place: _Place) -> None:
        """Give a room its engine, and on a shared machine the cores that no neighbour has."""
        node_id = place.room.nodes[0]
        taken = {p.slot for p in self._places if p.seat is not None and p.room.nodes[0] == node_id}
        place.slot = min(set(range(len(taken) + 1)) - taken)
        name = next((n.name for n in self._cluster.nodes() if n.id == node_id), node_id)
        share = (place.slot % self._a_machine, self._a_machine) if self._a_machine > 1 else None
        engine = RayTrialEngine(place.room, name, self._families, host=self._host, cores=share)
        place.seat = Seat(engine, name)

    def close(self) -> None:
        """End every engine, also those that run, and Ray where this process started it. Idempotent."""
        import ray

        engines = [place.seat.engine for place in self._places if place.seat is not None]
        for engine in engines:
            assert isinstance(engine, RayTrialEngine)
            engine.interrupt()
        for engine in engines:
            engine.close()
        if ray.is_initialized():
            for place in self._places:
                place.room.free()
            ray.shutdown()
        self._places = []
        self._families.forget()
