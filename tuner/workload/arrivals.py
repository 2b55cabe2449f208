"""When requests arrive: every process is drawn from one stream, in decimals, and rounded to whole microseconds.

The open-loop processes are scaled so that the first request arrives at 0 and the requested rate is met exactly over
the run: the rate that an operator asked for is then not one more source of noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal

from tuner.workload.spec import (
    ArrivalsSpec,
    ClosedLoopArrivals,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
)
from tuner.workload.streams import CONTEXT, Draws, Stream


@dataclass(frozen=True, slots=True)
class Arrival:
    """When and by whom one request is sent; the fields are those of `Request`."""

    arrival_s: float
    user: int | None = None
    think_s: float = 0.0


def arrivals(spec: ArrivalsSpec, count: int, source: Stream) -> list[Arrival]:
    """Arrivals of `count` requests, in order.

    Closed loop: request `i` belongs to user `i % users`, and a user's first request is sent at 0 without thinking.
    """
    if isinstance(spec, ClosedLoopArrivals):
        think_s = seconds(Decimal(spec.think_s))
        return [Arrival(0.0, user=i % spec.users, think_s=think_s if i >= spec.users else 0.0) for i in range(count)]
    return [Arrival(seconds(time)) for time in _open_loop(spec, count, source)]


def seconds(time: Decimal) -> float:
    """Round to whole microseconds: the grid on which workloads are fingerprinted."""
    return int(CONTEXT.multiply(time, Decimal(1_000_000)).to_integral_value(ROUND_HALF_EVEN)) / 1_000_000


def _open_loop(
    spec: PoissonArrivals | GammaArrivals | ConstantArrivals | RampArrivals, count: int, source: Stream
) -> list[Decimal]:
    if isinstance(spec, ConstantArrivals):
        return _at_rate([Decimal(i) for i in range(count)], spec.rate_per_s)
    if isinstance(spec, PoissonArrivals):
        return _at_rate(_unit_times(count, 1.0, source), spec.rate_per_s)
    if isinstance(spec, GammaArrivals):
        return _at_rate(_unit_times(count, spec.burstiness, source), spec.rate_per_s)
    return _ramp(_unit_times(count, spec.burstiness, source), spec)


def _unit_times(count: int, burstiness: float, source: Stream) -> list[Decimal]:
    """Return times from 0 to `count - 1` at a mean rate of exactly 1, with gamma gaps of shape `burstiness`."""
    draws = Draws(source)
    shape = Decimal(burstiness)
    times = [Decimal(0)]
    for _ in range(count - 1):
        gap = draws.exponential() if burstiness == 1.0 else draws.gamma(shape)
        times.append(CONTEXT.add(times[-1], gap))
    if times[-1] == 0:
        return times
    scale = CONTEXT.divide(Decimal(count - 1), times[-1])
    return [CONTEXT.multiply(time, scale) for time in times]


def _at_rate(unit_times: list[Decimal], rate_per_s: float) -> list[Decimal]:
    return [CONTEXT.divide(time, Decimal(rate_per_s)) for time in unit_times]


def _ramp(unit_times: list[Decimal], spec: RampArrivals) -> list[Decimal]:
    """Change of time: the time t at which a t + (b - a) t^2 / 2T, the expected number of arrivals, reaches each s.

    T = 2 (count - 1) / (a + b) is the length of the run; solved in the form that does not cancel when b is near a.
    """
    c = CONTEXT
    a, b = Decimal(spec.start_rate_per_s), Decimal(spec.end_rate_per_s)
    last = unit_times[-1]
    if last == 0:
        return unit_times
    slope = c.divide(c.multiply(c.subtract(b, a), c.add(a, b)), last)
    times = []
    for s in unit_times:
        root = c.sqrt(max(c.add(c.multiply(a, a), c.multiply(slope, s)), Decimal(0)))
        times.append(c.divide(c.multiply(Decimal(2), s), c.add(a, root)))
    return times
