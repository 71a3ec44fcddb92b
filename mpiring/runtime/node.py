"""What the ranks of one node share for a comm: a board on which each says what it brings, room for staging, and a barrier."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpiring.runtime import peers
from mpiring.runtime.barrier import LEFT, barrier
from mpiring.runtime.memory import PAGE, Mapping, share

LINE = 64
"""Bytes of a rank's line on the board: a cache line."""

STAGE = 2 << 20
"""Bytes that a rank stages at once. Of it, the lines read from others' and the results, 8 ranks have 6 MiB resident each."""

BLOCK = 128 * 1024
"""Bytes that a rank sums before it writes them on: the sum, and what it reads, stay in its core's cache meanwhile. Measured with
2, 4 and 8 ranks and arrays of 64 MiB: 32 KiB takes a quarter longer, 512 KiB is not faster.
"""


class Node:
    """The ranks of a comm that are on this rank's node, in order of rank; all methods that say so are collective among them."""

    def __init__(self, comm: MPI.Comm, numbers: Sequence[int], threaded: bool = False):
        """numbers: the node of every rank. threaded: the ranks may wait for each other beside other threads of theirs."""
        alone = len(set(numbers)) == 1
        self.comm = comm if alone else comm.Split(numbers[comm.rank], comm.rank)
        self.owned = not alone
        self.ranks = [rank for rank, number in enumerate(numbers) if number == numbers[comm.rank]]
        self.rank, self.size = self.comm.rank, self.comm.size
        self.pids = self.comm.allgather(os.getpid())
        head = -(-3 * LINE * self.size // PAGE) * PAGE
        self.row = STAGE + PAGE
        self.mapping: Mapping | None = share(self.comm, head + (self.size + 1) * self.row)
        self.private = peers.reachable(self.comm)
        if self.mapping is not None:
            memory = self.mapping.memory
            self.board = memoryview(memory[:LINE * self.size])
            self.line = self.board[LINE * self.rank:LINE * (self.rank + 1)]
            # Raised before a barrier, looked at behind it: in turn, for a rank that has gone on may raise the next one already.
            self.flags = [memoryview(memory[start:start + self.size]) for start in (LINE * self.size, (LINE + 1) * self.size)]
            self.arrived = memoryview(memory[2 * LINE * self.size:][:self.size])
            self.barrier = self.comm.Barrier if threaded or not alone else barrier(self.comm, self.arrived, self.ranks)
            self.stage = [memory[start:start + STAGE] for start in range(head, head + (self.size + 1) * self.row, self.row)]
        self.quiet = bytes(self.size)
        self._scratch: dict[str, np.ndarray] = {}

    @property
    def results(self) -> np.ndarray:
        """The staging row behind those of the ranks: what each has reduced for the others."""
        return self.stage[self.size]

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        """Return private scratch, from the start of a page on; plans of one comm share it, for they run one after the other."""
        if name not in self._scratch or self._scratch[name].nbytes < nbytes:
            room = np.empty(nbytes + PAGE, np.uint8)
            start = -room.ctypes.data % PAGE
            self._scratch[name] = room[start:start + nbytes]
        return self._scratch[name][:nbytes]

    def leave(self) -> None:
        """Let the others know that this rank will not come to a barrier any more, if it is our own that they wait in."""
        self.arrived[self.rank] = LEFT

    def free(self) -> None:
        """Let go of what is shared; collective."""
        if self.mapping is not None:
            self.board.release()
            self.line.release()
            self.arrived.release()
            for flags in self.flags:
                flags.release()
            self.stage = []
            self.mapping.free()
        self._scratch.clear()
        if self.owned:
            self.comm.Free()
