"""Where the ranks of one node combine their words: in memory that they share, in one step, where MPI's allreduce takes log2(n).

Double-buffered: a rank may be one round ahead of the slowest, no more, for a round takes the words of all.
"""

from __future__ import annotations

import platform

import numpy as np
from mpi4py import MPI

from mpiring.runtime import memory
from mpiring.runtime.barrier import ORDERED
from mpiring.runtime.channel import channel_of
from mpiring.runtime.memory import PAGE, Mapping

ROOM = 4 * PAGE
"""Bytes of words that a rank's row has room for; longer ones go by MPI."""

PROGRESS = 8
"""At which looks MPI makes progress as well: others may need it of messages that this rank has under way before they come here."""


class Board:
    """The rows of all ranks of a comm."""

    def __init__(self, comm: MPI.Comm, mapping: Mapping):
        self.comm, self.mapping, self.turn = comm, mapping, 0
        head = _head(comm.size)
        self.turns = memoryview(mapping.memory[:comm.size])
        self.rows = mapping.memory[head:].reshape(2, comm.size, ROOM)
        self.mine = [memoryview(rows[comm.rank]) for rows in self.rows]
        self.round = 0

    def give(self, words: bytes | bytearray) -> Ballot:
        """Give this rank's words; the ballot is complete when all have, in words of one length."""
        self.round += 1
        self.mine[self.round & 1][:len(words)] = words
        before, self.turn = self.turn, (self.turn + 1) % 3
        self.turns[self.comm.rank] = self.turn           # behind the words: on these processors others see them in this order
        return Ballot(self, before, self.rows[self.round & 1, :, :len(words)])

    def free(self) -> None:
        """Let go of the memory; collective."""
        self.turns.release()
        for row in self.mine:
            row.release()
        self.rows = None
        self.mapping.free()


class Ballot:
    """What the ranks give in one round; tested like a request of MPI's."""

    def __init__(self, board: Board, before: int, rows: np.ndarray):
        self.board, self.before, self.rows, self.looks = board, before, rows, 0

    def Test(self) -> bool:
        """Tell whether all ranks have given their words: others may be one turn ahead, and none is two behind."""
        self.looks += 1
        if self.looks % PROGRESS == 0:
            self.board.comm.Iprobe()
        return self.before not in self.board.turns.tobytes()

    def total(self) -> bytes:
        """Return the AND of all words."""
        return np.bitwise_and.reduce(self.rows, 0).tobytes()


def board_for(comm: MPI.Comm) -> Board | None:
    """Make the board of a comm; None, on all ranks, where they are not on one node or cannot share memory. Collective."""
    if comm.size == 1 or channel_of(comm).spread or platform.machine() not in ORDERED:
        return None
    mapping = memory.share(comm, _head(comm.size) + 2 * comm.size * ROOM)
    return mapping and Board(comm, mapping)


def _head(size: int) -> int:
    """Return the bytes before the rows: a turn for each rank, in whole pages."""
    return -(-size // PAGE) * PAGE
