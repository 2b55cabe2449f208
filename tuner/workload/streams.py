"""Random numbers that are the same on every machine, Python and NumPy, for ever.

NumPy promises the raw output of its bit generators but not the methods on top of them, and the last digit of `log`
and `exp` differs between C libraries. So this room uses neither: 64-bit words come from SplitMix64 (integer
arithmetic only), token ids from them by integer scaling, and everything that needs a logarithm is done in `decimal`,
whose `ln`, `exp` and `sqrt` are specified to be correctly rounded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
Words = NDArray[np.uint64]

CONTEXT = Context(prec=28, rounding=ROUND_HALF_EVEN)
"""Decimal arithmetic of this room; passed explicitly so that the caller's context cannot change a workload."""

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of
# Vigna's reference implementation (prng.di.unimi.it/splitmix64.c).
_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mixed(states: Words) -> Words:
    """SplitMix64's output function; arithmetic on uint64 arrays wraps, as it must."""
    z = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _scaled(words: Words, low: int, high: int) -> Ids:
    """Map words onto [low, high), which must be narrower than 2**32, by their upper halves."""
    return (np.uint64(low) + (((words >> np.uint64(32)) * np.uint64(high - low)) >> np.uint64(32))).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Stream:
    """An endless sequence of 64-bit words, read by position. Make one with `stream`."""

    key: int

    def words(self, count: int, start: int = 0) -> Words:
        """Words at positions `start` to `start + count`, shape (count,)."""
        positions = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        return _mixed(np.array([self.key], dtype=np.uint64) + positions * np.uint64(_GAMMA))

    def ids(self, count: int, vocabulary: tuple[int, int]) -> Ids:
        """`count` ids of the half-open range `vocabulary`, shape (count,)."""
        return _scaled(self.words(count), *vocabulary)

    def blocks(self, names: list[int], size: int, vocabulary: tuple[int, int]) -> Ids:
        """Return a block of ids for each name, shape (len(names), size): equal names give equal blocks."""
        keys = _mixed(_mixed(np.array([name & _MASK for name in names], dtype=np.uint64)) ^ np.uint64(self.key))
        positions = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        return _scaled(_mixed(keys[:, None] + positions[None, :]), *vocabulary)

    def order(self, count: int) -> list[int]:
        """Random order of `range(count)`."""
        return [int(i) for i in np.argsort(self.words(count), kind="stable")]


def stream(*labels: int | str) -> Stream:
    """Return the stream of these labels; different labels give unrelated streams."""
    name = "\0".join(f"{type(label).__name__}={label}" for label in labels)
    return Stream(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


class Draws:
    """Real-valued draws from a stream, one after the other, as decimals of 28 digits."""

    def __init__(self, source: Stream) -> None:
        self._source = source
        self._position = 0
        self._spare_normal: Decimal | None = None
        self._words: list[int] = []

    def uniform(self) -> Decimal:
        """Open interval (0, 1)."""
        if not self._words:
            block = self._source.words(1024, self._position)
            self._position += len(block)
            self._words = [int(word) for word in block[::-1]]
        word = self._words.pop() >> 11
        return CONTEXT.divide(Decimal(2 * word + 1), Decimal(2**54))

    def exponential(self) -> Decimal:
        """Mean 1."""
        return CONTEXT.minus(CONTEXT.ln(self.uniform()))

    def normal(self) -> Decimal:
        """Mean 0, variance 1: Marsaglia's polar method, which needs only a logarithm and a root."""
        if self._spare_normal is not None:
            spare, self._spare_normal = self._spare_normal, None
            return spare
        c = CONTEXT
        while True:
            x, y = (c.subtract(c.multiply(Decimal(2), self.uniform()), Decimal(1)) for _ in range(2))
            s = c.add(c.multiply(x, x), c.multiply(y, y))
            if 0 < s < 1:
                break
        factor = c.sqrt(c.divide(c.multiply(Decimal(-2), c.ln(s)), s))
        self._spare_normal = c.multiply(y, factor)
        return c.multiply(x, factor)

    def gamma(self, shape: Decimal) -> Decimal:
        """Gamma with this shape and mean `shape`: Marsaglia and Tsang, ACM TOMS 26(3), 2000."""
        c = CONTEXT
        if shape < 1:
            boost = c.exp(c.divide(c.ln(self.uniform()), shape))
            return c.multiply(self.gamma(c.add(shape, Decimal(1))), boost)
        d = c.subtract(shape, c.divide(Decimal(1), Decimal(3)))
        scale = c.divide(Decimal(1), c.sqrt(c.multiply(Decimal(9), d)))
        while True:
            x = self.normal()
            root = c.add(Decimal(1), c.multiply(scale, x))
            if root <= 0:
                continue
            v = c.multiply(c.multiply(root, root), root)
            bound = c.add(
                c.divide(c.multiply(x, x), Decimal(2)),
                c.multiply(d, c.add(c.subtract(Decimal(1), v), c.ln(v))),
            )
            if c.ln(self.uniform()) < bound:
                return c.multiply(d, v)
