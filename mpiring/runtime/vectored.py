"""An allreduce of many private arrays as if they were one vector: each rank of a node reads and writes its part where it is.

The kernel copies between processes from and to lists of places, so nothing has to be packed, and two barriers serve for all arrays.
Where the arrays lie is told once; a rank whose arrays have moved says so on the board, and then all tell each other anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from mpiring.algorithms.shared import part
from mpiring.runtime import memory, ops
from mpiring.runtime.arrays import HOST, address
from mpiring.runtime.binding import KERNEL_BLOCK, PROCESS_VM
from mpiring.runtime.channel import Channel
from mpiring.runtime.copying import copy
from mpiring.runtime.memory import PAGE
from mpiring.runtime.node import STAGE
from mpiring.runtime.peers import Transfer
from mpiring.runtime.plan import Call, Task
from mpiring.runtime.shared import SharedPlan

PIECES = 512
"""Places that one call of the kernel is given at most; it takes 1,024."""


SETTLED = 2
"""Runs with arrays where they were before, after which they are taken to stay there."""


class Piece(NamedTuple):
    """A range of the elements of one array."""

    array: int
    start: int
    length: int


def blocks(counts: Sequence[int], start: int, length: int, block: int) -> Iterator[list[Piece]]:
    """Cut a range of the vector that some arrays make up into blocks: of one long array, or of pieces of many short ones.

    >>> [[tuple(piece) for piece in found] for found in blocks([3, 2, 9, 1], 1, 13, 4)]
    [[(2, 0, 4)], [(2, 4, 4)], [(0, 1, 2), (1, 0, 2)], [(2, 8, 1)]]
    """
    gathered: list[Piece] = []
    size, begin = 0, 0
    for array, count in enumerate(counts):
        low, high = max(start - begin, 0), min(start + length - begin, count)
        begin += count
        while high - low > block // 2:
            yield [Piece(array, low, min(block, high - low))]
            low = min(low + block, high)
        if gathered and (size + high - low > block or len(gathered) == PIECES):
            yield gathered
            gathered, size = [], 0
        if high > low:
            gathered.append(Piece(array, low, high - low))
            size += high - low
    if gathered:
        yield gathered


class VectoredPlan(SharedPlan):
    """An allreduce of arrays of given lengths, of one dtype; for arrays that may be others at every run."""

    def __init__(self, channel: Channel, call: Call, operation: ops.Operation, dtype: np.dtype, counts: Sequence[int]):
        self.channel, self.call, self.node, self.operation, self.dtype = channel, call, channel.node, operation, dtype
        self.counts, self.path, self.gone, self.relay, self.segments = list(counts), "", "", None, 1
        self.signature = crc32(f"{call} {self.counts}".encode())
        self.length = len(self.counts)
        self.seen, self.known, self.packs, self.last = b"", {}, [], []
        self.phases: list[list[Task]] = []
        self.places = np.zeros((2, len(self.counts)), np.int64)
        self.moves = self.stays = 0

    def run(self, arrays: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Reduce the arrays into the outs; False, on all ranks, where some rank's cannot be reached, and nothing was done."""
        places = np.array([[address(array) for array in arrays], [address(out) for out in outs]], np.int64)
        if (places != self.places).any() or not self.moves:
            self.places, self.stays = places, 0
            self.moves += 1
        else:
            self.stays += 1
            if self.stays == SETTLED:
                self._collapse(arrays, outs)
        able = all([array.flags.c_contiguous and out.flags.c_contiguous for array, out in zip(arrays, outs)])
        if able and memory.shared_anywhere():            # those are read and written without the kernel, each on its own
            able = not any(memory.find(place) for place in {*places[0].tolist(), *places[1].tolist()})
        self.arrays, self.outs = arrays, outs
        self.line = np.array([self.signature, self.moves, able, 0, 0, 0, 0, 0], np.int64).tobytes()
        try:
            self()
        finally:
            self.arrays = self.outs = ()
        return self.path == PROCESS_VM

    def _collapse(self, arrays: Sequence[Any], outs: Sequence[Any]) -> None:
        memory.collapse((place, each.nbytes) for found, row in zip((arrays, outs), self.places.tolist())
                        for each, place in zip(found, row))

    def _meet(self) -> None:
        """Tell each other where the arrays are, and bind to that."""
        seen = self.node.board.tobytes()
        lines = np.frombuffer(seen, np.int64).reshape(self.node.size, -1)
        if (lines[:, 0] != self.signature).any():
            raise self._mismatch()
        self.path, self.phases = "", [[]]
        if lines[:, 2].all():
            everybody = np.empty((self.node.size, *self.places.shape), np.int64)
            self.node.comm.Allgather(self.places, everybody)
            self.path, self.phases = PROCESS_VM, [self._tasks(everybody)]
        self.seen = seen

    def _tasks(self, places: np.ndarray) -> list[Task]:
        """Return the work on this rank's part; places: of each rank's arrays and outs."""
        size, rank, itemsize = self.node.size, self.node.rank, self.dtype.itemsize
        combine = self.operation.combine(np, self.dtype)
        divide = ops.divide(np, self.dtype, size) if self.operation.average and size > 1 else None
        block = max(1, min(KERNEL_BLOCK, STAGE // size) // itemsize)
        own = [HOST.alias(array).reshape(-1) for array in self.arrays]
        taken = [HOST.alias(out).reshape(-1) for out in self.outs]
        tasks: list[Task] = []
        for pieces in blocks(self.counts, *part(sum(self.counts), size, rank), block):
            whole = pieces[0] if len(pieces) == 1 else None
            length = sum(piece.length for piece in pieces)
            sources = []
            for peer in range(size):
                if peer == rank and whole:
                    sources.append(own[whole.array][whole.start:whole.start + length])
                    continue
                view = self._room(f"peer {peer}", block, length, int(places[peer, 0, whole.array]) if whole else 0)
                sources.append(view)
                tasks += self._copies(pieces, own, view, True) if peer == rank else [
                    (Transfer(False, self.node.pids[peer], view, self._spans(pieces, places[peer, 0])), ())]
            result = taken[whole.array][whole.start:whole.start + length] if whole else self._room("result", block, length, 0)
            held = sources[0]
            for source in sources[1:]:
                into = result if source is sources[-1] else self._room("sum", block, length, 0)
                tasks.append((combine, (held, source, into)))
                held = into
            if divide:
                tasks.append((divide, (result,)))
            tasks += [] if whole else self._copies(pieces, taken, result, False)
            tasks += [(Transfer(True, self.node.pids[peer], result, self._spans(pieces, places[peer, 1])), ())
                      for peer in range(size) if peer != rank]
        return tasks

    def _room(self, name: str, block: int, length: int, address: int) -> np.ndarray:
        """Return scratch for a block, at the same place in its page as what is copied there: copies are fastest so."""
        room = self.node.scratch(name, block * self.dtype.itemsize + PAGE)
        return room[address % PAGE:][:length * self.dtype.itemsize].view(self.dtype)

    def _spans(self, pieces: Sequence[Piece], addresses: np.ndarray) -> list[tuple[int, int]]:
        itemsize = self.dtype.itemsize
        return [(int(addresses[piece.array]) + piece.start * itemsize, piece.length * itemsize) for piece in pieces]

    def _copies(self, pieces: Sequence[Piece], arrays: Sequence[np.ndarray], view: np.ndarray, into: bool) -> list[Task]:
        """Return the copies between pieces of this rank's arrays and a view of them all."""
        found, at = [], 0
        for piece in pieces:
            here, there = view[at:at + piece.length], arrays[piece.array][piece.start:piece.start + piece.length]
            found.append(copy(here, there) if into else copy(there, here))
            at += piece.length
        return found
