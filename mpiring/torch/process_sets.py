"""Sets of ranks that run operations on their own, and the engine that knows them.

A set has a number, 0 for that of all ranks. Scripts make a ProcessSet first and give it to init or add_process_set afterwards. It
holds no more than numbers, so it can be copied and pickled with what refers to it, such as a model.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from itertools import count

from mpi4py import MPI

from mpiring.engine.engine import Engine
from mpiring.engine.process_sets import ProcessSet as EngineSet
from mpiring.torch.exceptions import translated

_UNINITIALIZED = "mpiring.torch is not initialized; use hvd.init()"

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
"""The environment variable that allows to add and remove sets after init, like init(process_sets="dynamic")."""


class ProcessSet:
    """Some of the ranks, to be passed to init or add_process_set, and then to any operation.

    process_set_id: its number, None while it is not known to all ranks. ranks: in ascending order. mpi_comm: what it was made of,
    if that was a communicator.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: MPI.Comm | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm):
        """Take a list of ranks or an mpi4py communicator, of which every rank passes the one that it is part of."""
        if isinstance(ranks_or_comm, MPI.Comm):
            self.mpi_comm = ranks_or_comm
            return
        try:
            self.ranks = sorted(map(operator.index, ranks_or_comm))
        except TypeError:
            raise ValueError(f"ranks_or_comm is neither a list of ranks nor an mpi4py Comm: {ranks_or_comm!r}") from None

    def size(self) -> int:
        """Return the number of ranks."""
        return self._known().size

    def rank(self) -> int:
        """Return this rank's place among the set's ranks."""
        place = self._known().rank
        if place is None:
            raise ValueError(f"rank {_registry.engine.rank} is not part of {self}")
        return place

    def included(self) -> bool:
        """Tell whether this rank is part of the set."""
        return self._known().included

    def _known(self) -> EngineSet:
        running = engine()
        inner = _registry.inner.get(self.process_set_id)
        if inner is None:
            raise ValueError(f"on rank {running.rank}: {self} is not known: pass it to hvd.init or hvd.add_process_set")
        return inner

    def _settle(self, number: int, inner: EngineSet) -> None:
        self.process_set_id, self.ranks = number, list(inner.ranks)

    def _forget(self) -> None:
        self.process_set_id = None
        if self.mpi_comm is not None:
            self.ranks = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks; its number is 0, also before init."""

global_process_set.process_set_id = 0


class _Registry:
    """The engine, and all sets of it by their number."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.dynamic = False
        self.known: dict[int, ProcessSet] = {}
        self.inner: dict[int | None, EngineSet] = {}
        self.numbers = count()

    def open(self, engine: Engine, process_sets: Sequence[ProcessSet] | str | None) -> None:
        """Begin with an engine and the sets that were passed to init; collective."""
        self.dynamic = process_sets == "dynamic" or os.environ.get(DYNAMIC, "0").strip().lower() in ("1", "true")
        self.engine, self.numbers = engine, count()
        self.add(global_process_set, engine.everybody)
        for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            self.make(each)

    def make(self, process_set: ProcessSet) -> None:
        """Make a set that all ranks pass; one of communicators becomes as many as there are communicators."""
        if process_set.mpi_comm is None:
            self.add(process_set, self._made(process_set.ranks))
            return
        mine = _ranks_of(process_set.mpi_comm, self.engine.comm)
        for ranks in dict.fromkeys(filter(None, self.engine.comm.allgather(mine))):
            self.add(process_set if ranks == mine else ProcessSet(ranks), self._made(ranks))

    def _made(self, ranks: Sequence[int]) -> EngineSet:
        for number, known in self.known.items():
            if known.ranks == list(ranks):
                raise ValueError(f"a process set of the ranks {list(ranks)} exists already, with the number {number}")
        try:
            with translated():
                return self.engine.add_process_set(ranks)
        except TypeError as error:
            raise ValueError(str(error)) from None

    def add(self, process_set: ProcessSet, inner: EngineSet) -> None:
        """Give a set its number."""
        number = next(self.numbers)
        process_set._settle(number, inner)
        self.known[number], self.inner[number] = process_set, inner

    def close(self) -> None:
        """Forget all: the engine was shut down."""
        for process_set in self.known.values():
            process_set._forget()
        global_process_set.process_set_id, global_process_set.ranks = 0, []
        self.engine, self.known, self.inner = None, {}, {}

    def remove(self, number: int) -> None:
        """Let go of a set; collective."""
        self.known.pop(number)._forget()
        with translated():
            self.engine.remove_process_set(self.inner.pop(number))


_registry = _Registry()


def engine() -> Engine:
    """Return the engine; ValueError before init and after shutdown."""
    if _registry.engine is None:
        raise ValueError(_UNINITIALIZED)
    return _registry.engine


def within(process_set: ProcessSet, call: str) -> EngineSet:
    """Return the engine's own name for a set that this rank may use in `call`; ValueError where it may not."""
    running = engine()
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{call} on rank {running.rank}: process_set is of type {type(process_set).__name__}, not a ProcessSet")
    inner = _registry.inner.get(process_set.process_set_id)
    if inner is None:
        raise ValueError(f"{call} on rank {running.rank}: {process_set} is not known: pass it to hvd.init or hvd.add_process_set")
    if inner.rank is None:
        raise ValueError(f"{call} on rank {running.rank}: this rank is not part of {process_set}")
    return inner


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set known to all ranks, which must all call this, in the same order; return it.

    Raises ValueError for a set that exists already, for ranks that do not exist, and where init was not told "dynamic".
    """
    _check_dynamic("add_process_set")
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.mpi_comm is not None:
        raise NotImplementedError("add_process_set takes lists of ranks; sets of communicators are for init")
    if made.process_set_id in _registry.inner:
        raise ValueError(f"{made} is known already")
    _registry.make(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Let go of a set; all ranks must call this. Return whether it was one: not that of all ranks, nor one that is not known."""
    _check_dynamic("remove_process_set")
    number = process_set.process_set_id
    if number == 0 or number not in _registry.known:
        return False
    _registry.remove(number)
    process_set._forget()                                # which may be a copy
    return True


def _check_dynamic(call: str) -> None:
    engine()
    if not _registry.dynamic:
        raise ValueError(f'{call}: process sets were fixed by hvd.init; use hvd.init(process_sets="dynamic") or {DYNAMIC}=1')


def comm_among(ranks: Sequence[int], comm: MPI.Comm) -> MPI.Comm:
    """Make a communicator of some ranks of another one; these, and nobody else, call this."""
    whole = comm.Get_group()
    group = whole.Incl(ranks)
    made = comm.Create_group(group)
    group.Free()
    whole.Free()
    return made


def _ranks_of(comm: MPI.Comm, within_comm: MPI.Comm) -> tuple[int, ...] | None:
    """Return a communicator's ranks as numbered in another one; None for a rank without one."""
    if comm == MPI.COMM_NULL:
        return None
    group, whole = comm.Get_group(), within_comm.Get_group()
    ranks = tuple(sorted(group.Translate_ranks(None, whole)))
    group.Free()
    whole.Free()
    if MPI.UNDEFINED in ranks:
        raise ValueError("a process set's communicator has ranks that hvd.init's does not have")
    return ranks
