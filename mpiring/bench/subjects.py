"""What is measured: an algorithm of one collective on one pair of buffers, behind one call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import cuts
from mpiring.bench import inputs
from mpiring.runtime import ops

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
}
"""busbw / algbw by number of ranks, as in nccl-tests' doc/PERFORMANCE.md."""


class Buffers:
    """The buffers of one size, their inputs, and what must come out; shared by all algorithms."""

    def __init__(self, collective: str, op: str, dtype: np.dtype, count: int, comm: MPI.Comm, inplace: bool):
        self.collective, self.op, self.inplace, self.comm = collective, op, inplace, comm
        own = cuts(count, comm.size)[comm.rank]
        gathers = collective == "allgather"
        self.base = inputs.pattern("SUM" if gathers else op, dtype, 0 if gathers else comm.rank, comm.size)
        self.expected = self.base if gathers else inputs.reduced(op, dtype, comm.size)
        self.send_start = own.start if gathers and not inplace else 0
        self.send = np.empty(own.stop - own.start if gathers and not inplace else count, dtype)
        self.recv = self.send if inplace else np.empty(own.stop - own.start if collective == "reduce_scatter" else count, dtype)
        self.result = self.recv[own] if inplace and collective == "reduce_scatter" else self.recv
        self.result_start = own.start if collective == "reduce_scatter" else 0
        self.own = own
        inputs.fill(self.send, self.base, self.send_start)

    def reset(self) -> None:
        """Write the input again where a result in place has overwritten it."""
        if self.inplace:
            inputs.fill(self.send, self.base, self.send_start)

    def spoil(self) -> None:
        """Make sure that a result which is right has been written by the run that follows."""
        if not self.inplace:
            self.recv[...] = 99
        elif self.collective == "allgather":
            self.recv[:self.own.start] = 99
            self.recv[self.own.stop:] = 99

    def wrong(self) -> tuple[int, str]:
        """Count the wrong elements on all ranks, and describe the first."""
        count, place = inputs.wrong(self.result, self.expected, self.result_start)
        text = ""
        if count:
            right = self.expected[(self.result_start + place) % inputs.PERIOD]
            text = f"rank {self.comm.rank}, element {self.result_start + place}: {self.result[place]} instead of {right}"
        found = self.comm.allgather((count, text))
        return sum(count for count, _ in found), next((text for _, text in found if text), "")


def bind(name: str, buffers: Buffers) -> Callable[[], object]:
    """Return the call that runs an algorithm on the buffers."""
    recv = None if buffers.inplace else buffers.recv
    if ":" in name:
        function, comm = _load(name), buffers.comm

        def run() -> None:
            if not buffers.inplace:
                np.copyto(buffers.recv, buffers.send)
            function(buffers.recv, comm)

        return run
    call = getattr(mpiring, buffers.collective)
    if buffers.collective == "allgather":
        return lambda: call(buffers.send, recv, comm=buffers.comm, algorithm=name)
    op = ops.NAMES[buffers.op]
    return lambda: call(buffers.send, recv, op=op, comm=buffers.comm, algorithm=name)


def _load(name: str) -> Callable:
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
