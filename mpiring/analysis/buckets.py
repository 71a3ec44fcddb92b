"""How much of the communication of gradients backward hides, and what the size of the buckets does to it.

Gradients become ready one after another while backward goes on. They are collected, in that order, into buckets, and each bucket is
reduced as one vector: small buckets start early but pay a latency each, large ones start late. As PyTorch's DistributedDataParallel
and Horovod do; source: S. Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from mpiring.algorithms.registry import Algorithm
from mpiring.analysis.cost import simulate
from mpiring.analysis.gradients import Gradient
from mpiring.analysis.machines import Machine

TimeOf = Callable[[int], float]
"""The seconds that a reduction of so many bytes takes."""

ALONE = 0
"""The size of a bucket that holds one gradient."""


NEAR = 1e-3


class Exposure(NamedTuple):
    """Times in seconds: backward with what follows it, backward alone, all communication, and what of it follows backward."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    buckets: int


def exposed(gradients: Iterable[Gradient], bucket_bytes: int, time_of: TimeOf) -> Exposure:
    """Return what buckets of at most `bucket_bytes` bytes lead to (ALONE: a bucket for each gradient).

    A gradient larger than that is a bucket of its own. A bucket is reduced once its last gradient is ready and the bucket before
    it is reduced; backward goes on meanwhile and is not slowed down.
    """
    now = end = communication = 0.0
    buckets = list(_buckets(gradients, bucket_bytes))
    for nbytes, took in buckets:
        now += took
        spent = time_of(nbytes)
        end = max(end, now) + spent
        communication += spent
    return Exposure(max(end, now), now, communication, max(end - now, 0.0), len(buckets))


def _buckets(gradients: Iterable[Gradient], bucket_bytes: int) -> Iterator[tuple[int, float]]:
    """Yield the bytes of every bucket, and the seconds of backward from the bucket before to its last gradient."""
    nbytes, took = 0, 0.0
    for gradient in gradients:
        if nbytes and nbytes + gradient.nbytes > bucket_bytes:
            yield nbytes, took
            nbytes, took = 0, 0.0
        nbytes, took = nbytes + gradient.nbytes, took + gradient.seconds
    if nbytes or took:
        yield nbytes, took


def sizes(nbytes: int, factor: int = 4) -> list[int]:
    """Return sizes to look at: each gradient alone, 4 KiB and up by the factor, and the whole model of `nbytes`."""
    found = [ALONE]
    bucket = 4096
    while bucket < nbytes:
        found.append(bucket)
        bucket *= factor
    return [*found, nbytes]


def curve(gradients: Sequence[Gradient], time_of: TimeOf, bucket_sizes: Iterable[int] | None = None) -> list[tuple[int, Exposure]]:
    """Return what each size of bucket leads to; left out, `sizes` of the model."""
    chosen = sizes(sum(gradient.nbytes for gradient in gradients)) if bucket_sizes is None else bucket_sizes
    return [(bucket, exposed(gradients, bucket, time_of)) for bucket in chosen]


def best(points: Sequence[tuple[int, Exposure]]) -> int:
    """Return the largest size whose exposed time is the least, give or take a thousandth of backward.

    The largest, for each call costs the program itself something, which is not in the price.
    """
    least = min(found.exposed for _, found in points)
    return max(bucket for bucket, found in points if found.exposed <= least + NEAR * found.compute)


def timer(algorithms: Sequence[Algorithm], machine: Machine, ranks: int | None = None) -> TimeOf:
    """Return a function that prices a reduction of so many bytes of float32 by the fastest of the algorithms; it remembers."""
    @cache
    def time_of(nbytes: int) -> float:
        return min(simulate(algorithm, nbytes, machine, ranks).seconds for algorithm in algorithms)
    return time_of
