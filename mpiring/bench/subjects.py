"""What is measured: an algorithm of one collective on one pair of buffers, behind one call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import cuts
from mpiring.algorithms.registry import COLLECTIVES, Algorithm
from mpiring.bench import inputs
from mpiring.runtime import ops

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "alltoall": lambda n: (n - 1) / n,
}
"""busbw / algbw by number of ranks, as in nccl-tests' doc/PERFORMANCE.md."""


class Buffers:
    """The buffers of one size, their inputs, and what must come out; shared by all algorithms."""

    def __init__(self, collective: str, op: str, dtype: np.dtype, count: int, comm: MPI.Comm, inplace: bool, root: int = 0):
        self.collective, self.op, self.comm, self.root = collective, op, comm, root
        self.inplace = inplace or collective == "broadcast"
        self.own = own = cuts(count, comm.size)[comm.rank]
        reduces, at_root = COLLECTIVES[collective].reduces, comm.rank == root
        self.base = inputs.pattern(op if reduces else "SUM", dtype, comm.rank if reduces else 0, comm.size)
        self.expected = inputs.reduced(op, dtype, comm.size) if reduces else self.base
        gathered = collective == "allgather" and not self.inplace
        self.send_start = own.start if gathered else comm.rank * count if collective == "alltoall" else 0
        self.send = np.empty(own.stop - own.start if gathered else count, dtype)
        received = own.stop - own.start if collective == "reduce_scatter" else count
        self.recv = self.send if self.inplace else np.empty(received, dtype)
        self.result = self.recv[own] if self.inplace and collective == "reduce_scatter" else self.recv
        self.result_start = own.start if collective == "reduce_scatter" else 0
        self.judged = at_root or collective != "reduce"
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
        elif self.collective == "broadcast" and self.comm.rank != self.root:
            self.recv[...] = 99

    def wrong(self) -> tuple[int, str]:
        """Count the wrong elements on all ranks, and describe the first."""
        count, text = 0, ""
        for result, start in self._parts():
            bad, place = inputs.wrong(result, self.expected, start)
            if bad and not count:
                right = self.expected[(start + place) % inputs.PERIOD]
                text = f"rank {self.comm.rank}, element {start + place}: {result[place]} instead of {right}"
            count += bad
        found = self.comm.allgather((count, text))
        return sum(count for count, _ in found), next((text for _, text in found if text), "")

    def _parts(self) -> list[tuple[np.ndarray, int]]:
        """Return the parts of the result, each with the place in the pattern where it starts."""
        if self.collective != "alltoall":
            return [(self.result, self.result_start)] if self.judged else []
        size, count = self.comm.size, self.send.size
        return [(block, source * count + self.own.start) for source, block in enumerate(np.split(self.recv, size))]


def bind(name: str, buffers: Buffers) -> Callable[[], object]:
    """Return the call that runs an algorithm on the buffers."""
    recv = None if buffers.inplace else buffers.recv
    if ":" in name:
        function, comm = _load(name), buffers.comm
        if isinstance(function, Algorithm):
            return lambda: mpiring.allreduce(buffers.send, recv, op=ops.NAMES[buffers.op], comm=comm, algorithm=function)

        def run() -> None:
            if not buffers.inplace:
                np.copyto(buffers.recv, buffers.send)
            function(buffers.recv, comm)

        return run
    call = getattr(mpiring, buffers.collective)
    options = {"comm": buffers.comm, "algorithm": name}
    if COLLECTIVES[buffers.collective].reduces:
        options["op"] = ops.NAMES[buffers.op]
    if COLLECTIVES[buffers.collective].rooted:
        options["root"] = buffers.root
    if buffers.collective == "broadcast":
        return lambda: call(buffers.recv, **options)
    return lambda: call(buffers.send, recv, **options)


def _load(name: str) -> Callable:
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
