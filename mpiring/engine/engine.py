"""The engine: named asynchronous operations on NumPy and CuPy arrays, agreed among the ranks and exchanged many at a time."""

from __future__ import annotations

import atexit
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.engine import requests
from mpiring.engine.driver import Interrupts, drive
from mpiring.engine.loop import Loop
from mpiring.engine.operation import Operation
from mpiring.engine.process_sets import ProcessSet, checked
from mpiring.engine.settings import agree
from mpiring.engine.timeline import Timeline
from mpiring.errors import MismatchError, ShutdownError
from mpiring.runtime.barrier import give_way
from mpiring.runtime.channel import check_comm


class Engine:
    """Runs named operations among the ranks of a comm beside the caller; see the README for what its ranks must agree about."""

    def __init__(self, comm: MPI.Comm | None = None, *, fusion_threshold: int | None = None, cycle_time: float | None = None,
                 deterministic: bool | None = None, timeline: Any = None, stall_seconds: float | None = None,
                 timeout: float | None = None, process_sets: Iterable[Sequence[int]] = ()):
        """Make an engine; collective. The arguments that are given come before the environment's variables.

        comm: an intra-communicator, which is duplicated (default: COMM_WORLD). fusion_threshold: bytes fused into one exchange;
        0 fuses nothing. cycle_time: seconds in which more operations may join the first one, unless somebody waits for it.
        deterministic: fuse in groups that rank 0's program alone defines, so that every run gives the same bits. timeline: where
        to write a trace, a file for each rank. stall_seconds: when to warn that ranks are missing; timeout: when to give
        up; 0: never. process_sets: lists of ranks, to be ProcessSets in `process_sets`.

        Raises TypeError or ValueError, naming argument or variable.
        """
        comm = MPI.COMM_WORLD if comm is None else comm
        check_comm(comm)
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.settings = agree({"fusion_threshold": fusion_threshold, "cycle_time": cycle_time, "deterministic": deterministic,
                               "timeline": timeline, "stall_seconds": stall_seconds, "timeout": timeout}, self.comm)
        self.threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.forked = False
        self.everybody = ProcessSet(tuple(range(self.size)), self.rank, None)
        self._sets: list[ProcessSet] = []
        self._timeline: Timeline | None = None
        self._past: Counter[str] = Counter()             # of process sets that are gone
        self._open(self.everybody)
        self._main = self.everybody.loop                 # None when this engine cannot be used any more
        _ENGINES.add(self)
        self.process_sets = [self.add_process_set(ranks) for ranks in process_sets]
        if self.settings.timeline:
            self.start_timeline(self.settings.timeline)

    # Operations

    def allreduce_async(self, array: Any, out: Any = None, *, name: str | None = None, op: Any = MPI.SUM, prescale: float = 1.0,
                        postscale: float = 1.0, process_set: ProcessSet | None = None) -> Operation:
        """Start to reduce the arrays of all ranks element by element, and return a handle for poll and synchronize.

        array: a NumPy or CuPy array of any numeric dtype, shape and strides; not to be touched until synchronize has returned.
        out: takes the result, like the array in shape and dtype; the array itself for a result in place; left out: a new array.
        name: pairs the operations of all ranks, whatever the order of calls; those without are paired by their order.
        op: as for mpiring.allreduce, or mpiring.ADASUM. prescale, postscale: factors for what goes in and what comes out (integers
        in float64, truncated toward zero; 16-bit floats in float32). process_set: the ranks that take part (default: all).

        Raises TypeError or ValueError at once for wrong arguments and a name that is on its way already. What goes wrong later,
        synchronize raises.
        """
        loop = (process_set is None and self._main) or self._loop("allreduce", process_set)
        known = loop.recent.get(name) if type(name) is str else None
        if known is not None:
            operation = requests.again(known, name, array, out, op, prescale, postscale)
            if operation is not None:
                return loop.submit("allreduce", operation)
        operation = self._submit("allreduce", loop, name, lambda: requests.allreduce([array], [out], op, prescale, postscale, True))
        if name is not None:
            loop.remember(name, requests.known(operation))
        return operation

    def grouped_allreduce_async(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, *, name: str | None = None,
                                op: Any = MPI.SUM, prescale: float = 1.0, postscale: float = 1.0,
                                process_set: ProcessSet | None = None) -> Operation:
        """Start to reduce several arrays as one operation, all or none; the result is a list. Otherwise as allreduce_async."""
        loop = self._loop("grouped_allreduce", process_set)
        return self._submit("grouped_allreduce", loop, name,
                            lambda: requests.allreduce(arrays, outs, op, prescale, postscale, False))

    def allgather_async(self, array: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> Operation:
        """Start to gather the rows of all ranks, in the order of ranks, into a new array on each.

        array: of one dtype and the same shape everywhere, but for the first dimension, which may differ.
        """
        loop = self._loop("allgather", process_set)
        return self._submit("allgather", loop, name, lambda: requests.allgather(array))

    def broadcast_async(self, array: Any, root: int = 0, out: Any = None, *, name: str | None = None,
                        process_set: ProcessSet | None = None) -> Operation:
        """Start to give all ranks the root's array.

        array: of the same shape and dtype everywhere; only read, unless it is `out`. root: the engine's rank, also in a process
        set. out: as for allreduce_async.
        """
        loop = self._loop("broadcast", process_set)
        return self._submit("broadcast", loop, name,
                            lambda: requests.broadcast(array, root, out, loop.labels, loop.comm.rank))

    def alltoall_async(self, array: Any, splits: Sequence[int] | None = None, *, name: str | None = None,
                       process_set: ProcessSet | None = None) -> Operation:
        """Start to send rows of an array to every rank.

        splits: how many rows go to each rank, from the first row on; left out, all ranks get as many. The result is the array of
        the rows received, in the order of ranks; where splits were given, a pair: the array, and how many came from each rank.
        """
        loop = self._loop("alltoall", process_set)
        return self._submit("alltoall", loop, name, lambda: requests.alltoall(array, splits, loop.comm.size))

    def reduce_scatter_async(self, array: Any, *, name: str | None = None, op: Any = MPI.SUM, prescale: float = 1.0,
                             postscale: float = 1.0, process_set: ProcessSet | None = None) -> Operation:
        """Start to reduce the arrays of all ranks and leave each rank its rows: as even as can be, first ranks one row more.

        The result is a new array. Otherwise as allreduce_async.
        """
        loop = self._loop("reduce_scatter", process_set)
        return self._submit("reduce_scatter", loop, name, lambda: requests.reduce_scatter(
            array, op, prescale, postscale, loop.comm.size, loop.comm.rank))

    def allreduce(self, array: Any, out: Any = None, **options: Any) -> Any:
        """Reduce, and return the result; see allreduce_async."""
        return self.synchronize(self.allreduce_async(array, out, **options))

    def grouped_allreduce(self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, **options: Any) -> list[Any]:
        """Reduce several arrays, and return the list of results; see grouped_allreduce_async."""
        return self.synchronize(self.grouped_allreduce_async(arrays, outs, **options))

    def allgather(self, array: Any, **options: Any) -> Any:
        """Gather, and return the result; see allgather_async."""
        return self.synchronize(self.allgather_async(array, **options))

    def broadcast(self, array: Any, root: int = 0, out: Any = None, **options: Any) -> Any:
        """Broadcast, and return the result; see broadcast_async."""
        return self.synchronize(self.broadcast_async(array, root, out, **options))

    def alltoall(self, array: Any, splits: Sequence[int] | None = None, **options: Any) -> Any:
        """Exchange rows, and return the result; see alltoall_async."""
        return self.synchronize(self.alltoall_async(array, splits, **options))

    def reduce_scatter(self, array: Any, **options: Any) -> Any:
        """Reduce, and return this rank's rows; see reduce_scatter_async."""
        return self.synchronize(self.reduce_scatter_async(array, **options))

    def barrier(self, *, name: str | None = None, process_set: ProcessSet | None = None) -> None:
        """Wait until all ranks of the process set have called this."""
        loop = self._loop("barrier", process_set)
        self.synchronize(self._submit("barrier", loop, name, requests.barrier))

    def join(self) -> int:
        """Say that this rank has no more data, and wait until all ranks have said so; return the rank that was last.

        Until then this rank takes part in the allreduces of the others, among all ranks, with zeros (an AVERAGE divides by all
        ranks all the same). Other operations fail on the ranks that wait for them, with MismatchError.
        """
        return self.synchronize(self._loop("join", None).join())

    def broadcast_object(self, obj: Any = None, root: int = 0, *, name: str | None = None,
                         process_set: ProcessSet | None = None) -> Any:
        """Return the root's object, of any size, on all ranks; it is pickled. Other ranks' `obj` is not looked at."""
        data = pickle.dumps(obj) if self.rank == root else b""
        size = int(self.broadcast(np.array(len(data)), root, name=name, process_set=process_set))
        mine = np.frombuffer(data, np.uint8) if self.rank == root else np.empty(size, np.uint8)
        part = None if name is None else f"{name}.data"
        return pickle.loads(self.broadcast(mine, root, mine, name=part, process_set=process_set).data)

    def allgather_object(self, obj: Any, *, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
        """Return the objects of all ranks, of any size, in the order of ranks; they are pickled."""
        handle = self.allgather_async(np.frombuffer(pickle.dumps(obj), np.uint8), name=name, process_set=process_set)
        everything = self.synchronize(handle)
        return [pickle.loads(part.data) for part in np.split(everything, np.cumsum(handle.rows)[:-1])]

    # Handles

    def poll(self, handle: Operation) -> bool:
        """Tell whether an operation is over, well or not; synchronize then does not wait.

        Where MPI was not initialised for several threads, this and synchronize are what moves operations on.
        """
        self._check_handle("poll", handle)
        if handle.done:
            return True
        self._check_process("poll")
        self._seal()
        if self.threaded:
            give_way()                                   # who polls in a loop would leave the engine's thread no time
        else:
            drive(_all_loops(), lambda: True)
        return handle.done

    def _check_handle(self, call: str, handle: Any) -> None:
        if not isinstance(handle, Operation):
            raise TypeError(f"{call} on rank {self.rank}: handle is of type {type(handle).__name__}, not one of an operation")

    def _seal(self) -> None:
        """Where groups are fixed, let one end here in every process set: every run comes to this place in the program."""
        if self.settings.deterministic:
            for loop in self._loops():
                loop.seal()

    def synchronize(self, handle: Operation) -> Any:
        """Wait for an operation; return its result, or raise what went wrong. Every rank must come to that.

        Raises MismatchError where ranks disagree about the operation, PeerError where another rank failed meanwhile, StallError
        where others did not come in time, ShutdownError.
        """
        self._check_handle("synchronize", handle)
        if not handle.done:
            self._check_process("synchronize")
            self._seal()
            self._wait(handle.loop, lambda: handle.done)
        if handle.error is not None:
            raise type(handle.error)(*handle.error.args)
        return handle.result

    def _wait(self, loop: Loop, over: Callable[[], bool]) -> None:
        """Wait until something is over. Where engines have no threads, nobody but this one moves other sets and engines on."""
        if self.threaded:
            loop.driver.wait(over)
            return
        with Interrupts() as interrupts:
            drive(_all_loops(), lambda: over() or interrupts.caught)

    # Process sets

    def add_process_set(self, ranks: Iterable[int]) -> ProcessSet:
        """Make a process set of some of the engine's ranks. All ranks of the engine must call this, with the same ranks."""
        self._check_process("add_process_set")
        try:
            members = checked(ranks, self.size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"add_process_set on rank {self.rank}: {error}") from None
        found = self.comm.allgather(members)
        if len(set(found)) > 1:
            odd = next(rank for rank, other in enumerate(found) if other != found[0])
            raise MismatchError(f"add_process_set on rank {self.rank}: ranks disagree: rank 0 has {list(found[0])}, rank {odd} has "
                             f"{list(found[odd])}")
        made = ProcessSet(members, self.rank, None)
        self._open(made)
        return made

    def remove_process_set(self, process_set: ProcessSet) -> None:
        """Let go of a process set. All ranks of the engine must call this; what is on its way there fails with ShutdownError."""
        self._check_process("remove_process_set")
        if process_set not in self._sets or process_set is self.everybody:
            raise ValueError(f"remove_process_set on rank {self.rank}: {process_set!r} is not a process set of this engine")
        self._close([process_set])

    def _open(self, made: ProcessSet) -> None:
        comm = self.comm.Split(0 if made.included else MPI.UNDEFINED, self.rank)
        if made.included:
            made.loop = Loop(comm, made.ranks, self.settings, self.threaded)
            made.loop.exchanges.timeline = self._timeline
            if made is not self.everybody:
                made.loop.exchanges.suffix = f" of ranks {', '.join(map(str, made.ranks))}"
        self._sets.append(made)

    def _close(self, sets: list[ProcessSet]) -> None:
        loops = [found.loop for found in sets if found.loop is not None]
        for loop in loops:
            loop.leave()
        for loop in loops:
            self._wait(loop, lambda loop=loop: loop.ended)
        for loop in loops:
            loop.free()
            self._past.update(loop.counts)
        for found in sets:
            found.loop = None
            self._sets.remove(found)

    # The engine itself

    def start_timeline(self, path: Any) -> None:
        """Write a trace of what this rank does from now on; trace.json is trace.rank3.json on rank 3.

        The file is a Chrome trace, complete at any time, for ui.perfetto.dev and `python -m mpiring timeline`. Raises OSError
        where it cannot be written, ValueError where a timeline is being written already.
        """
        self._check_process("start_timeline")
        if self._timeline is not None:
            raise ValueError(f"start_timeline on rank {self.rank}: a timeline is being written already: stop_timeline first")
        self._timeline = Timeline(os.fspath(path), self.rank, self.size)
        for loop in self._loops():
            loop.exchanges.timeline = self._timeline

    def stop_timeline(self) -> None:
        """Complete the trace; nothing happens if there is none."""
        line, self._timeline = self._timeline, None
        for loop in self._loops():
            loop.exchanges.timeline = None
        if line is not None:
            line.close()

    def metrics(self) -> dict[str, float]:
        """Return what this rank has counted since the engine was made, over all process sets.

        operations, errors: that are over, and those of them that failed. pending: on their way. bytes: exchanged. exchanges: how
        many; fused: arrays in an exchange, in the mean. rounds: agreements. known, declared: names agreed by a bit alone, and
        those that had to be described. stalls: warnings. seconds_negotiate, _pack, _exchange, _unpack: of the engine's thread.
        """
        loops = self._loops()
        total = Counter(dict.fromkeys(_METRICS, 0))
        for counts in [self._past, *(loop.counts for loop in loops)]:
            total.update(dict(counts))
        arrays = total.pop("exchanged", 0)
        return {**total, "fused": arrays / total["exchanges"] if total["exchanges"] else 0.0,
                "pending": sum(len(loop.flight) + len(loop.held) for loop in loops)}

    def shutdown(self) -> None:
        """End the engine; all ranks should. What all ranks have submitted is completed, the rest fails with ShutdownError.

        A rank waits a few seconds for the others to come to this, or to wait for it in an operation.
        """
        if self.forked or not self._sets:
            return
        if MPI.Is_finalized():
            self._sets.clear()
            return
        self._main = None
        self._close(list(self._sets))
        self.stop_timeline()
        self.comm.Free()
        _ENGINES.discard(self)

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return not self._sets

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Engine of {self.size} ranks, rank {self.rank}{'' if self._sets else ', shut down'}>"

    def _loops(self) -> list[Loop]:
        return [found.loop for found in self._sets if found.loop is not None]

    def _loop(self, call: str, process_set: ProcessSet | None) -> Loop:
        """Return what runs a process set's operations; an error where this rank has no part in it."""
        chosen = self.everybody if process_set is None else process_set
        loop = getattr(chosen, "loop", None)
        if loop is None or self.forked or (process_set is not None and process_set not in self._sets):
            self._check_process(call)
            raise self._no_loop(call, chosen)
        return loop

    def _no_loop(self, call: str, chosen: Any) -> Exception:
        where = f"{call} on rank {self.rank}:"
        if not isinstance(chosen, ProcessSet):
            return TypeError(f"{where} process_set is of type {type(chosen).__name__}, not a ProcessSet")
        if chosen in self._sets:
            return ValueError(f"{where} this rank is not part of {chosen!r}")
        return ValueError(f"{where} process_set {chosen!r} " + ("was removed" if chosen.loop is None else "is of another engine"))

    def _check_process(self, call: str) -> None:
        if self.forked:
            raise RuntimeError(f"{call}: this process was forked from rank {self.rank}, whose engine is not for it to use")
        if not self._sets:
            raise ShutdownError(f"{call} on rank {self.rank}: the engine has been shut down")

    def _submit(self, call: str, loop: Loop, name: str | None, make: Callable[[], Operation]) -> Operation:
        try:
            if name is not None and not isinstance(name, str):
                raise TypeError(f"name is of type {type(name).__name__}, not a str")
            operation = make()
        except (TypeError, ValueError) as error:
            raise type(error)(f"{call} on rank {self.rank}: {error}") from None
        operation.key = name
        return loop.submit(call, operation)


_METRICS = ("operations", "errors", "bytes", "exchanges", "rounds", "known", "declared", "stalls", "seconds_negotiate",
            "seconds_pack", "seconds_exchange", "seconds_unpack")

_ENGINES: set[Engine] = set()
"""All that were not shut down: the others rely on a rank, whether or not its program still knows its engine."""


def _all_loops() -> list[Loop]:
    return [loop for engine in _ENGINES for loop in engine._loops()]


def _at_exit() -> None:
    for engine in list(_ENGINES):
        engine.shutdown()


def _in_child() -> None:
    for engine in _ENGINES:
        engine.forked, engine._main = True, None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
