"""What is measured: an algorithm of one collective, or what it is compared with, on one pair of buffers behind one call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring import collectives
from mpiring.algorithms.cuts import cuts
from mpiring.algorithms.registry import COLLECTIVES, Algorithm
from mpiring.bench import inputs, peers
from mpiring.runtime import ops

PLAN, COMM, BOUND = "plan", "comm", "bound"
"""An allreduce through a plan made once, MPI's own collective without mpiring, and what no allreduce can undercut."""

OTHERS = (PLAN, COMM, BOUND, peers.GLOO)
"""Subjects that are not algorithms of a call of mpiring."""

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

    def __init__(self, collective: str, op: str, dtype: np.dtype, count: int, comm: MPI.Comm, inplace: bool, root: int = 0,
                 buffers: str = "ordinary"):
        self.collective, self.op, self.comm, self.root, self.count = collective, op, comm, root, count
        self.shared: list[np.ndarray] = []
        self.inplace = inplace or collective == "broadcast"
        self.own = own = cuts(count, comm.size)[comm.rank]
        reduces, at_root = COLLECTIVES[collective].reduces, comm.rank == root
        self.base = inputs.pattern(op if reduces else "SUM", dtype, comm.rank if reduces else 0, comm.size)
        self.expected = inputs.reduced(op, dtype, comm.size) if reduces else self.base
        gathered = collective == "allgather" and not self.inplace
        self.send_start = own.start if gathered else comm.rank * count if collective == "alltoall" else 0
        make = np.empty if buffers == "ordinary" else self._in_shared_memory
        self.send = make(own.stop - own.start if gathered else count, dtype)
        received = own.stop - own.start if collective == "reduce_scatter" else count
        self.recv = self.send if self.inplace else make(received, dtype)
        self.result = self.recv[own] if self.inplace and collective == "reduce_scatter" else self.recv
        self.result_start = own.start if collective == "reduce_scatter" else 0
        self.judged = at_root or collective != "reduce"
        inputs.fill(self.send, self.base, self.send_start)

    def _in_shared_memory(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Make an array from one as long on all ranks: where they hold chunks, the first rank's is the longest."""
        longest = count if count == self.count else cuts(self.count, self.comm.size)[0].stop
        self.shared.append(mpiring.empty(longest, dtype, self.comm))
        return self.shared[-1][:count]

    def free(self) -> None:
        """Give shared memory back, on all ranks. What is bound to these buffers must not be called any more."""
        for array in self.shared:
            with suppress(ValueError):      # where no memory can be shared, they are ordinary arrays
                mpiring.free(array)
        self.shared.clear()

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
    """Return the call that runs a subject on the buffers. TypeError or ValueError, here or in its first run: it cannot."""
    others = {COMM: peers.by_comm, peers.GLOO: peers.by_gloo, BOUND: _bound}
    if name in others:
        return others[name](buffers)
    if name == PLAN:
        return mpiring.allreduce_init(*_arrays(buffers), **_options(buffers))
    algorithm = _load(name) if ":" in name else name
    if isinstance(algorithm, (str, Algorithm)):
        return partial(getattr(mpiring, buffers.collective), *_arrays(buffers), **_options(buffers), algorithm=algorithm)

    def run() -> None:
        if not buffers.inplace:
            np.copyto(buffers.recv, buffers.send)
        algorithm(buffers.recv, buffers.comm)

    return run


def what_ran(name: str, buffers: Buffers, call: Callable) -> tuple[str | None, str | None]:
    """Return which algorithm a subject's call has run, and how; (None, None) where mpiring does not know."""
    if name == PLAN:
        return call.algorithm, call.path
    if name in OTHERS or not isinstance(call, partial):
        return None, None
    send, recv = (*_arrays(buffers), None)[:2]
    plan = collectives.plan_of(buffers.collective, send, recv, **_options(buffers), algorithm=call.keywords["algorithm"])
    return plan.algorithm, plan.path


def _arrays(buffers: Buffers) -> tuple[np.ndarray, ...]:
    return (buffers.recv,) if buffers.inplace else (buffers.send, buffers.recv)


def _options(buffers: Buffers) -> dict[str, Any]:
    options: dict[str, Any] = {"comm": buffers.comm}
    if COLLECTIVES[buffers.collective].reduces:
        options["op"] = ops.NAMES[buffers.op]
    if COLLECTIVES[buffers.collective].rooted:
        options["root"] = buffers.root
    return options


def _bound(buffers: Buffers) -> Callable[[], object]:
    """Return the call that reads and writes each byte of this rank's array once, and ends when all ranks have done so."""
    array = buffers.recv
    if array.dtype in (np.float32, np.float64):
        scale = partial(np.multiply, array, array.dtype.type(1), out=array)
    else:     # multiplied more slowly than memory moves; setting no bit is as fast for all dtypes
        words = array.view(np.uint8)
        scale = partial(np.bitwise_or, words, np.uint8(0), out=words)

    def run() -> None:
        scale()
        buffers.comm.Barrier()                           # ranks that share a core scale one after the other

    return run


def _load(name: str) -> Callable:
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
