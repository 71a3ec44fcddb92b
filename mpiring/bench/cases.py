"""What the engine is measured with: named arrays submitted to it and awaited, beside the same bytes by plain calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.analysis import gradients
from mpiring.bench import inputs
from mpiring.bench.subjects import COMM
from mpiring.bench.timing import interleaved

ENGINE, ALLREDUCE, WORK, BOTH = "engine", "allreduce", "work", "both"
"""Subjects beside COMM: the engine, mpiring.allreduce, NumPy at work without either, and the engine while NumPy works."""

DTYPE = np.dtype(np.float32)

FIRST, PARTS = 1 << 20, 8
"""Bytes at which the search begins for a communication as long as the work, and the arrays that it is made of."""

BLOCK = 8192
"""Elements in one call of NumPy at work: they stay in the cache, and the call, of some 100 us, does without the GIL."""


class Arrays:
    """Named arrays of one rank, their inputs, and what must come out. To each its place is added, so none is like another."""

    def __init__(self, sizes: dict[str, int], comm: MPI.Comm, inplace: bool, draw: Random | None = None):
        """sizes: elements by name. draw: another order for every run."""
        self.comm, self.inplace, self.draw = comm, inplace, draw
        self.names, counts = list(sizes), list(sizes.values())
        self.nbytes = sum(counts) * DTYPE.itemsize
        base = inputs.pattern("SUM", DTYPE, comm.rank, comm.size)
        self.expected = inputs.reduced("SUM", DTYPE, comm.size)
        self.given, self.results = ([np.empty(count, DTYPE) for count in counts] for _ in range(2))
        self.order = list(range(len(counts)))
        for place, array in enumerate(self.given):
            inputs.fill(array, base + DTYPE.type(place))

    @property
    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The arrays to reduce and those for the results, which are the same ones in place."""
        return list(zip(self.results if self.inplace else self.given, self.results))

    def reset(self) -> None:
        """Write the inputs again that results in place have overwritten, and draw an order."""
        if self.draw:
            self.draw.shuffle(self.order)
        if self.inplace:
            for given, result in zip(self.given, self.results):
                np.copyto(result, given)

    def spoil(self) -> None:
        """Make sure that results which are right have been written by the run that follows."""
        if not self.inplace:
            for result in self.results:
                result[...] = 99

    def wrong(self) -> tuple[int, str]:
        """Count the wrong elements on all ranks, and describe the first."""
        count, text = 0, ""
        for place, (name, result) in enumerate(zip(self.names, self.results)):
            expected = self.expected + DTYPE.type(place * self.comm.size)
            bad, element = inputs.wrong(result, expected)
            if bad and not count:
                right = expected[element % inputs.PERIOD]
                text = f"rank {self.comm.rank}, array {name!r}, element {element}: {result[element]} instead of {right}"
            count += bad
        found = self.comm.allgather((count, text))
        return sum(count for count, _ in found), next((text for _, text in found if text), "")


class Setting(NamedTuple):
    """What all cases are given. most: bytes that one has at most; seconds: of the work behind which communication is to hide."""

    engine: Any
    comm: MPI.Comm
    inplace: bool
    most: int
    seconds: float

    def arrays(self, sizes: dict[str, int], draw: Random | None = None) -> Arrays:
        """Make arrays; those that do not fit are left out."""
        return Arrays(within(sizes, self.most), self.comm, self.inplace, draw)


class Subject(NamedTuple):
    """One of the calls that a case times in turn, and the arrays that it reduces."""

    name: str
    call: Callable[[], object]
    arrays: Arrays | None = None


def within(sizes: dict[str, int], most: int) -> dict[str, int]:
    """Return the arrays that fit into so many bytes, in order; one that does not is left out. The smallest one always stays."""
    kept: dict[str, int] = {}
    for name, count in sizes.items():
        if (sum(kept.values()) + count) * DTYPE.itemsize <= most:
            kept[name] = count
    smallest = min(sizes, key=lambda name: sizes[name])
    return kept or {smallest: sizes[smallest]}


def by_engine(engine: Any, arrays: Arrays, meanwhile: Callable[[], object] | None = None) -> Callable[[], None]:
    """Return the call that submits all arrays in their order, does something else, and awaits them."""
    submits = [partial(engine.allreduce_async, given, out, name=name) for name, (given, out) in zip(arrays.names, arrays.pairs)]

    def run() -> None:
        handles = [submits[place]() for place in arrays.order]
        if meanwhile:
            meanwhile()
        for handle in handles:
            engine.synchronize(handle)

    return run


def by_allreduce(arrays: Arrays) -> Callable[[], None]:
    """Return the call of mpiring.allreduce for one array after the other, in the same order on all ranks."""
    return _in_turn([partial(mpiring.allreduce, *((out,) if out is given else (given, out)), comm=arrays.comm)
                     for given, out in arrays.pairs])


def by_comm(arrays: Arrays) -> Callable[[], None]:
    """Return the same by mpi4py's comm, without mpiring."""
    return _in_turn([partial(arrays.comm.Allreduce, MPI.IN_PLACE if out is given else given, out) for given, out in arrays.pairs])


def _in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def many_small(setting: Setting) -> list[Subject]:
    """1,000 arrays of 4 KiB, in an order of its own on every rank and in every iteration."""
    return _all_three(setting, {f"small.{index}": 1024 for index in range(1000)}, Random(setting.comm.rank))


def resnet50(setting: Setting) -> list[Subject]:
    """ResNet-50's gradients in the order of backward, beside one call with as many bytes."""
    arrays = setting.arrays({gradient.name: gradient.count for gradient in gradients.load("resnet50").gradients})
    whole = setting.arrays({"whole": arrays.nbytes // DTYPE.itemsize})
    return [Subject(ENGINE, by_engine(setting.engine, arrays), arrays), Subject(ALLREDUCE, by_allreduce(whole), whole)]


def single(setting: Setting) -> list[Subject]:
    """One element: what an operation costs beside moving bytes."""
    return _all_three(setting, {"single": 1})


def _all_three(setting: Setting, sizes: dict[str, int], draw: Random | None = None) -> list[Subject]:
    arrays = setting.arrays(sizes, draw)
    return [Subject(ENGINE, by_engine(setting.engine, arrays), arrays), Subject(ALLREDUCE, by_allreduce(arrays), arrays),
            Subject(COMM, by_comm(arrays), arrays)]


def overlap(setting: Setting) -> list[Subject]:
    """Work, a communication that takes about as long and does not depend on it, and both at once."""
    work, arrays = _work(setting), _as_long(setting)
    return [Subject(WORK, work), Subject(ENGINE, by_engine(setting.engine, arrays), arrays),
            Subject(BOTH, by_engine(setting.engine, arrays, work), arrays)]


def _work(setting: Setting) -> Callable[[], None]:
    """Return NumPy work of so many seconds on the slowest rank, the same on all ranks."""
    given, out = np.linspace(0, 1, BLOCK), np.empty(BLOCK)
    call, trial = partial(np.sin, given, out=out), 100
    took = _seconds(_in_turn([call] * trial), setting.comm)
    return _in_turn([call] * max(1, round(trial * setting.seconds / took)))


def _as_long(setting: Setting) -> Arrays:
    """Return arrays of equal size whose communication takes about as long as the work: tried with ever more bytes."""
    nbytes = min(FIRST, setting.most)
    while True:
        arrays = _equal(setting, nbytes)
        took = _seconds(by_engine(setting.engine, arrays), setting.comm, arrays.reset)
        if took >= setting.seconds / 2 or nbytes >= setting.most:
            return _equal(setting, min(setting.most, int(nbytes * setting.seconds / took)))
        nbytes = min(setting.most, 4 * nbytes)


def _equal(setting: Setting, nbytes: int) -> Arrays:
    count = max(1, nbytes // PARTS // DTYPE.itemsize)
    return setting.arrays({f"overlap.{count}.{index}": count for index in range(PARTS)})


def _seconds(call: Callable[[], object], comm: MPI.Comm, reset: Callable[[], None] = lambda: None) -> float:
    """Return what a call takes on the slowest rank; the same on all ranks."""
    return float(np.median(interleaved([call], reset, 2, 5, 1, comm)))


CASES: dict[str, Callable[[Setting], list[Subject]]] = {case.__name__: case for case in (many_small, resnet50, single, overlap)}

OVERLAP = overlap.__name__
