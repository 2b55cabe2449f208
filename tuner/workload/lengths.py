"""Prompt and output lengths: exact shares, and draws from distributions."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

from tuner.workload.spec import ChoiceTokens, LognormalShape, LognormalTokens, UniformTokens
from tuner.workload.streams import CONTEXT, Draws, Stream

OutputLengths = int | UniformTokens | LognormalTokens | ChoiceTokens


def apportioned(shares: Mapping[int, float], count: int) -> dict[int, int]:
    """Split `count` by shares (largest remainder; ties to the one listed first), so that counts sum exactly.

    Shares that are counts summing to `count` come back unchanged.
    """
    weights = {length: Fraction(share) for length, share in shares.items()}
    total = sum(weights.values())
    quotas = {length: weight * count / total for length, weight in weights.items()}
    counts = {length: int(quota) for length, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda length: counts[length] - quotas[length])
    for length in by_remainder[: count - sum(counts.values())]:
        counts[length] += 1
    return counts


def exact_lengths(spec: int | tuple[int, ...] | dict[int, float], count: int, source: Stream) -> list[int]:
    """Lengths of `count` prompts in random order; the shares are met exactly."""
    if isinstance(spec, int):
        return [spec] * count
    if isinstance(spec, tuple):
        spec = {length: float(spec.count(length)) for length in spec}
    ordered = [length for length, times in apportioned(spec, count).items() for _ in range(times)]
    return [ordered[i] for i in source.order(count)]


def output_lengths(spec: OutputLengths, count: int, source: Stream) -> list[int]:
    """Output lengths of `count` requests, each at least 1 token."""
    if isinstance(spec, int):
        return [spec] * count
    if isinstance(spec, UniformTokens):
        return [int(i) for i in source.ids(count, (spec.uniform.low, spec.uniform.high + 1))]
    if isinstance(spec, ChoiceTokens):
        return exact_lengths(spec.choices, count, source)
    draws = Draws(source)
    return [_lognormal(spec.lognormal, draws) for _ in range(count)]


def longest_output(spec: OutputLengths) -> int:
    """Return the longest output, in tokens, that can be drawn."""
    if isinstance(spec, int):
        return spec
    if isinstance(spec, UniformTokens):
        return spec.uniform.high
    return spec.lognormal.max if isinstance(spec, LognormalTokens) else max(spec.choices)


def _lognormal(shape: LognormalShape, draws: Draws) -> int:
    scale = CONTEXT.exp(CONTEXT.multiply(Decimal(shape.sigma), draws.normal()))
    length = int(CONTEXT.multiply(Decimal(shape.median), scale).to_integral_value(ROUND_HALF_EVEN))
    return min(max(length, 1), shape.max)
