"""Time several calls in turn, iteration by iteration, so that a noisy machine treats them alike."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from time import perf_counter

import numpy as np
from mpi4py import MPI


def interleaved(calls: list[Callable[[], object]], reset: Callable[[], None], warmup: int, iterations: int, repeat: int,
                comm: MPI.Comm) -> np.ndarray:
    """Run A B C, B A C, ..., each `repeat` times in a row; return the seconds of one run of each in every iteration, on the
    slowest rank: shape (calls, iterations).

    Each iteration has an order of its own, the same on all ranks: what one call leaves in the caches, or running, would else
    always fall on the same other one.
    """
    times = np.zeros((len(calls), iterations))
    order, draw = list(range(len(calls))), Random(0)
    for iteration in range(-warmup, iterations):
        draw.shuffle(order)
        for index in order:
            call = calls[index]
            reset()
            comm.Barrier()
            start = perf_counter()
            for _ in range(repeat):
                call()
            took = (perf_counter() - start) / repeat
            if iteration >= 0:
                times[index, iteration] = took
    comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return times
