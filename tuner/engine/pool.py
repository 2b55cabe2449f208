"""A pool of engines that are there from the first trial to the last."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.engine.protocol import Seat, TrialEngine


class FixedPool:
    """An `EnginePool` of given engines on one machine.

    Parameters
    ----------
    machine:
        Its name, for people.
    """

    def __init__(self, engines: Sequence[TrialEngine], machine: str) -> None:
        self._seats = tuple(Seat(engine, machine) for engine in engines)

    def seats(self) -> Sequence[Seat]:
        """Return all of them."""
        return self._seats

    def close(self) -> None:
        """End every engine."""
        for seat in self._seats:
            seat.engine.close()
