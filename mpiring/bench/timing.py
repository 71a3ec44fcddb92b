"""Time several calls in turn, iteration by iteration, so that a noisy machine treats them alike."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from mpi4py import MPI


def interleaved(calls: list[Callable[[], object]], reset: Callable[[], None], warmup: int, iterations: int, repeat: int,
                comm: MPI.Comm) -> np.ndarray:
    """Run A B C A B C ..., each `repeat` times in a row; return the seconds of one run of each in every iteration, on the slowest
    rank: shape (calls, iterations).
    """
    times = np.zeros((len(calls), iterations))
    for iteration in range(-warmup, iterations):
        for index, call in enumerate(calls):
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
