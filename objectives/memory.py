"""The memory constraint as one signed number: (needed - available) / available, <= 0 is feasible.

Every measured configuration has a value (its headroom, negative) and so has every one that failed for want of memory
(positive), which is what teaches an optimiser where the border lies.
"""

from __future__ import annotations

from objectives.engine_use import HOST
from objectives.measurement import Failure, FailureKind, Measurement

LOWEST, HIGHEST = -1.0, 10.0
"""Range of a violation. (needed - available) / available cannot be below -1, and grows without bound as `available`
goes to 0, where one such value would drown all others in a surrogate model."""

UNKNOWN_SHORTAGE = 0.5
"""Violation of a failure whose log states no figures: half as much memory again as there was. A choice, not a
measurement: clearly infeasible, and of the size of ordinary shortages, so that it does not dominate their scale."""

SMALLEST_SHORTAGE = 0.01
"""Least violation of a failure. Allocators also fail with enough memory in sum (fragmentation, a peak between two
readings), and what did not run must never count as feasible."""


def memory_violation(outcome: Measurement | Failure) -> float:
    """Signed share of memory that was missing (positive) or left (negative), within [-1, 10].

    For a measurement the larger, that is the tighter, of two: the KV pool against one request of `max_model_len`, and
    the peak of the fullest accelerator against its size. 0 where neither is known: it did run, so it fits, by a
    margin that nobody has seen. The series of the host is not device memory and does not count.

    An `invalid_config` needs no memory and gets the same finite value as a shortage without figures, as it has to be
    told to the optimiser all the same.

    Raises
    ------
    ValueError
        For a failure of the machine: it says nothing about the configuration.
    """
    return _of_failure(outcome) if isinstance(outcome, Failure) else _of_measurement(outcome)


def _of_measurement(measurement: Measurement) -> float:
    engine = measurement.engine
    shares = [
        relative_shortage(s.memory_used_gib, s.memory_total_gib)
        for s in measurement.device
        if s.device != HOST and s.memory_used_gib is not None and s.memory_total_gib is not None
    ]
    if engine.kv_tokens is not None and engine.kv_tokens_needed is not None:
        shares.append(relative_shortage(engine.kv_tokens_needed, engine.kv_tokens))
    return max(shares, default=0.0)


def _of_failure(failure: Failure) -> float:
    if not failure.kind.is_configuration_fault:
        raise ValueError(f"{failure.kind.value} is a fault of the machine and has no memory violation")
    if failure.kind is FailureKind.INVALID_CONFIG or failure.needed_gib is None or failure.available_gib is None:
        return UNKNOWN_SHORTAGE
    return max(SMALLEST_SHORTAGE, relative_shortage(failure.needed_gib, failure.available_gib))


def relative_shortage(needed: float, available: float) -> float:
    """(needed - available) / available, within [-1, 10]; 10 where nothing is available at all."""
    if available <= 0:
        return HIGHEST
    return min(HIGHEST, max(LOWEST, (needed - available) / available))
