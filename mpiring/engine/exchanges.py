"""What is agreed is exchanged: small arrays fused, large ones from where they are, each kind of operation in its own way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from math import prod
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts as balanced
from mpiring.engine.adasum import Adasum
from mpiring.engine.bursts import Burst, pack, padded, put, settle, take, unpack
from mpiring.engine.movers import Plans, Requests
from mpiring.engine.negotiation import Slot
from mpiring.engine.operation import Operation, dtype_of
from mpiring.engine.schedule import ALONE, BURST, VECTOR, Batch, batches
from mpiring.engine.settings import Settings
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space
from mpiring.runtime.channel import Cache

PLACES = 1 << 16
"""Places in bursts whose views are kept."""

Rows = dict[Hashable, np.ndarray]
"""By key, the rows that each rank brings to an allgather, or sends to each rank in an alltoall."""

Exchange = Generator[MPI.Request, None, None]


class Batches(list):
    """The exchanges for some operations that are ready.

    varying: those whose rows differ between ranks. length: the arrays in all exchanges, by which a cache counts.
    """

    def __init__(self, ready: Sequence[Slot], threshold: int, vectors_from: int | None):
        super().__init__(batches(ready, threshold, vectors_from))
        self.varying = [slot for slot in ready if slot.description.kind in ("allgather", "alltoall")]
        self.length = sum(len(batch.members) for batch in self)


class Exchanges:
    """The exchanges of one process set. Its generators yield the requests that MPI has to complete before they go on."""

    def __init__(self, comm: MPI.Comm, threaded: bool, settings: Settings, counts: Counter[str]):
        self.comm, self.threaded, self.threshold, self.counts = comm, threaded, settings.fusion_threshold, counts
        self.mover: Plans | Requests = Plans(comm) if threaded else Requests(comm)
        # Which arrays are one vector depends on what is ready at once.
        self.vectors_from = None if settings.deterministic else self.mover.vectors_from
        self.adasum = Adasum(comm)
        self.timeline: Any = None
        self.suffix = ""                                 # of a process set's rows in a timeline
        self.rooms: dict[Space, Any] = {}
        self.known = Cache(PLACES)
        self.device: Space = HOST                        # the GPU whose arrays were exchanged last

    def perform(self, ready: Sequence[Slot], finish: Callable[[list[Operation], Exception | None], None]) -> Exchange:
        """Exchange what is ready; hand every operation back as soon as its exchange is over, with what went wrong."""
        rows: Rows = {}
        found = self._batches(ready)
        if found.varying:
            rows = yield from self._rows(found.varying)
        for batch in found:
            error = None
            try:
                yield from self._exchange(batch, rows)
            except Exception as caught:
                error = caught
            finish([slot.operation for slot, _ in batch.members if slot.operation is not None], error)
        for slot in ready:
            slot.operation = None                        # nor its arrays are kept

    def _exchange(self, batch: Batch, rows: Rows) -> Exchange:
        yield from _TOGETHER[batch.way](self, batch, rows)

    def _batches(self, ready: Sequence[Slot]) -> Batches:
        """Return the exchanges, with the places of arrays in bursts; the same as last time for the same operations."""
        key = tuple([slot.signature for slot in ready])
        known = self.known.get(key)
        if known is None:
            known = Batches(ready, self.threshold, self.vectors_from)
            self.known.put(key, known)
        return known

    def free(self) -> None:
        """Let go of the buffers."""
        self.known.clear()
        self.rooms.clear()

    def _rows(self, varying: list[Slot]) -> Generator[MPI.Request, None, Rows]:
        mine = np.array([row for slot in varying for row in slot.operation.rows], np.int64)
        everyone = np.empty((self.comm.size, mine.size), np.int64)
        yield self.comm.Iallgather(mine, everyone)
        edges = np.cumsum([len(slot.operation.rows) for slot in varying])[:-1]
        return dict(zip((slot.key for slot in varying), np.split(everyone, edges, axis=1)))

    # Many arrays at once

    def _fused(self, batch: Batch, rows: Rows) -> Exchange:
        begun, description = perf_counter(), batch.description
        burst = batch.burst = batch.burst or self._burst(batch)
        owners, indexes = [slot.operation for slot, _ in batch.members], [index for _, index in batch.members]
        broadcast, sends = description.kind == "broadcast", self.comm.rank == description.root
        if not broadcast or sends:
            pack(burst, owners, indexes)
            settle(burst, owners)
        packed = perf_counter()
        if burst.move is None:
            if description.op == "ADASUM":
                burst.move = self.adasum.repeated(burst.whole, [view.size for view in burst.views])
            else:
                burst.move = self.mover.repeated(burst.whole, ops.NAMES.get(description.op), description.root)
        label = yield from burst.move()
        moved = perf_counter()
        if broadcast and sends:                          # what is sent from where it is wanted may not even be writable
            owners = [None if operation.outs[index] is operation.arrays[index] else operation
                      for operation, index in zip(owners, indexes)]
        unpack(burst, owners, indexes)
        settle(burst, owners)
        self._account(batch, burst.nbytes, label, begun, packed, moved)

    def _burst(self, batch: Batch) -> Burst:
        description = batch.description
        dtypes = {name: dtype_of(name) for slot, _ in batch.members for name in slot.description.dtypes}
        layout = [(dtypes[slot.description.dtypes[index]], slot.description.shapes[index]) for slot, index in batch.members]
        # The elements of a sum lie side by side; a broadcast carries bytes, so each array begins where its dtype wants it.
        dtype, grain = (layout[0][0], 1) if description.kind == "allreduce" else (np.dtype(np.uint8), 16)
        space = next((slot.operation.space for slot, _ in batch.members if slot.operation), self.device)
        space = HOST if description.op == "ADASUM" else space
        scaled = any((slot.description.prescale, slot.description.postscale) != (1, 1) for slot, _ in batch.members)
        return Burst(lambda nbytes: self._room(space, nbytes), layout, grain, dtype, not description.device, scaled)

    def _room(self, space: Space, nbytes: int) -> Any:
        """Return the buffer for bursts; made once, for the largest."""
        if space is not HOST:
            self.device = space
        room = self.rooms.get(space)
        if room is None or room.nbytes < nbytes:
            room = self.rooms[space] = self.mover.room(space, max(nbytes, padded(self.threshold)))
        return room

    def _vector(self, batch: Batch, rows: Rows) -> Exchange:
        """Reduce many arrays where they are; fused where some rank's cannot be reached."""
        begun, description = perf_counter(), batch.description
        shapes = [slot.description.shapes[index] for slot, index in batch.members]
        if batch.burst is None:
            batch.burst = self.mover.vector(description.op, dtype_of(description.dtypes[0]), [prod(shape) for shape in shapes])
        arrays, outs = [], []
        for (slot, index), shape in zip(batch.members, shapes):
            operation = slot.operation
            arrays.append(operation.arrays[index] if operation else np.zeros(shape, dtype_of(description.dtypes[0])))
            outs.append(operation.outs[index] if operation else arrays[-1])
        packed = perf_counter()
        if batch.burst.run(arrays, outs):
            self._account(batch, sum(array.nbytes for array in arrays), "shared (vector)", begun, packed, perf_counter())
            return
        for other in batch.instead:
            yield from self._exchange(other, rows)

    # One array

    def _alone(self, batch: Batch, rows: Rows) -> Exchange:
        (slot, index), = batch.members
        operation = slot.operation
        if slot.description.op == "ADASUM":
            yield from self._adasum(batch, slot, index)
            return
        way = _WAYS[slot.description.kind]
        if operation is None or operation.space is HOST or not self.threaded:
            yield from way(self, batch, slot, index, rows)
            return
        with operation.space.on(operation.stream):       # plans yield nothing, so no other code runs in this context
            yield from way(self, batch, slot, index, rows)

    def _allreduce(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        begun, description, operation = perf_counter(), slot.description, slot.operation
        if operation is None:                            # this rank has joined
            array = out = self.device.xp.zeros(description.shapes[index], dtype_of(description.dtypes[index]))
            op = ops.NAMES[description.op]
        else:
            array, out, op = operation.arrays[index], operation.outs[index], operation.op
            if description.prescale != 1:
                put(out, array, operation, description.prescale)
                array = out
        packed = perf_counter()
        label = yield from self.mover.allreduce(array, out, op)
        moved = perf_counter()
        if operation is not None and description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle(None, [operation])
        self._account(batch, array.nbytes, label, begun, packed, moved)

    def _adasum(self, batch: Batch, slot: Slot, index: int) -> Exchange:
        """Combine one array in host memory: where the result goes, if that can be."""
        begun, description, operation = perf_counter(), slot.description, slot.operation
        out = operation.outs[index] if operation else None
        if isinstance(out, np.ndarray) and out.flags.c_contiguous:
            line = out
        else:
            line = np.zeros(description.shapes[index], dtype_of(description.dtypes[index]))
        if operation is not None and (line is not operation.arrays[index] or description.prescale != 1):
            put(line, operation.arrays[index], operation, description.prescale)
        packed = perf_counter()
        label = yield from self.adasum.combine(line.reshape(-1), [line.size])
        moved = perf_counter()
        if operation is not None and (line is not out or description.postscale != 1):
            take(out, line, operation, description.postscale)
            settle(None, [operation])
        self._account(batch, line.nbytes, label, begun, packed, moved)

    def _broadcast(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        begun, operation, root = perf_counter(), slot.operation, slot.description.root
        array, out = operation.arrays[index], operation.outs[index]
        if self.comm.rank == root and out is not array:
            put(out, array, operation)
        packed = perf_counter()
        label = yield from self.mover.broadcast(out, root)
        self._account(batch, out.nbytes, label, begun, packed, perf_counter())

    def _reduce_scatter(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        begun, description, operation = perf_counter(), slot.description, slot.operation
        array, out = operation.arrays[0], operation.outs[0]
        if description.prescale != 1:
            scaled = operation.space.made(array.shape, array.dtype)
            put(scaled, array, operation, description.prescale)
            array = scaled
        counts = [share * prod(array.shape[1:]) for share in balanced(array.shape[0], self.comm.size)]
        packed = perf_counter()
        label = yield from self.mover.reduce_scatter(array, out, operation.op, counts)
        moved = perf_counter()
        if description.postscale != 1:
            take(out, out, operation, description.postscale)
            settle(None, [operation])
        self._account(batch, array.nbytes, label, begun, packed, moved)

    def _allgather(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        begun, operation = perf_counter(), slot.operation
        array, every = operation.arrays[0], rows[slot.key][:, 0].tolist()
        rest = array.shape[1:]
        out = operation.space.made((sum(every), *rest), array.dtype)
        label = yield from self.mover.allgather(array, out, [count * prod(rest) for count in every])
        operation.result, operation.rows = out, every
        self._account(batch, out.nbytes, label, begun, begun, perf_counter())

    def _alltoall(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        begun, operation, table = perf_counter(), slot.operation, rows[slot.key]
        array, received = operation.arrays[0], table[:, self.comm.rank]
        rest = array.shape[1:]
        out = operation.space.made((int(received.sum()), *rest), array.dtype)
        label = yield from self.mover.alltoall(array[:sum(operation.rows)], out, (table * prod(rest)).tolist())
        operation.result = (out, received.copy()) if operation.splits else out
        self._account(batch, out.nbytes, label, begun, begun, perf_counter())

    def _barrier(self, batch: Batch, slot: Slot, index: int, rows: Rows) -> Exchange:
        """Nothing is left to do: all ranks have come."""
        yield from ()

    # What it took

    def _account(self, batch: Batch, nbytes: int, label: str, begun: float, packed: float, moved: float) -> None:
        end, counts, line = perf_counter(), self.counts, self.timeline
        counts["bytes"] += nbytes
        counts["exchanges"] += 1
        counts["exchanged"] += len(batch.members)
        counts["seconds_pack"] += packed - begun
        counts["seconds_exchange"] += moved - packed
        counts["seconds_unpack"] += end - moved
        if line is None:
            return
        times = begun, packed, moved, end
        _draw(line, "", times, algorithm=label, bytes=nbytes, operations=len(batch.members), kind=batch.description.kind,
              ranks=self.comm.size)
        for slot in dict.fromkeys(slot for slot, _ in batch.members if slot.operation is not None):
            operation = slot.operation
            track = self._track(operation)
            if not operation.drawn:
                operation.drawn = True
                line.span(track, "negotiate", operation.submitted, operation.agreed, operation=str(operation.description),
                          bytes=operation.nbytes, round=slot.used)
                line.span(track, "queue", operation.agreed, begun)
            _draw(line, track, times, algorithm=label)

    def _track(self, operation: Operation) -> str:
        """Return the row of an operation in a timeline: one for all without a name, and its own in each process set."""
        name = operation.key if isinstance(operation.key, str) else f"unnamed {operation.description.kind}"
        return f"{name or repr(name)}{self.suffix}"


def _draw(line: Any, track: str, times: Sequence[float], **about: Any) -> None:
    for name, begin, end, args in zip(("pack", "exchange", "unpack"), times, times[1:], ({}, about, {})):
        if end > begin:
            line.span(track, name, begin, end, **args)


_WAYS = {"allreduce": Exchanges._allreduce, "broadcast": Exchanges._broadcast, "reduce_scatter": Exchanges._reduce_scatter,
         "allgather": Exchanges._allgather, "alltoall": Exchanges._alltoall, "barrier": Exchanges._barrier}
"""What is done about each kind of operation that is not fused."""

_TOGETHER = {ALONE: Exchanges._alone, BURST: Exchanges._fused, VECTOR: Exchanges._vector}
"""How the arrays of a batch are exchanged."""
