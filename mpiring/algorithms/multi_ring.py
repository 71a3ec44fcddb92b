"""Several rings at the same time, each with a share of the vector in proportion to its bandwidth.

A machine whose ranks are joined by more links than one ring uses is taken apart into rings: the eight GPUs of a p3.16xlarge into
a ring of doubled and a ring of single NVLinks, with weights 2 and 1.
Source: S. Jeaugey, "Massively scale your deep learning training with NCCL 2.4", NVIDIA developer blog (2019), on rings over NVLink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from mpiring.algorithms import ring
from mpiring.algorithms.setting import Ring
from mpiring.algorithms.step import Step
from mpiring.algorithms.weave import among, beside, on_chunks, spread


def allreduce(rank: int, size: int, rings: Sequence[Ring]) -> Iterator[Step]:
    """Reduce the vector onto all: 2(n-1) steps for each ring, which do not wait for each other; each rank sends 2(n-1)/n in all."""
    lanes, base = [], 0
    for order, weight in rings:
        lanes.append(on_chunks(spread(base, weight), among(order, ring.allreduce(_places(order)[rank], size))))
        base += size * weight
    return beside(*lanes)


@lru_cache(maxsize=64)
def _places(order: tuple[int, ...]) -> list[int]:
    """Return every rank's place in a ring."""
    return sorted(range(len(order)), key=order.__getitem__)
