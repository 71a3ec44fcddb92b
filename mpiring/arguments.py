"""The arguments of a call: wrapped, and checked before anything is sent."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.registry import Algorithm
from mpiring.runtime import memory, ops
from mpiring.runtime.arrays import HOST, Space, shares_elements, wrap


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, wrapped but not checked yet."""

    collective: str
    algorithm: str | Algorithm
    send: Any
    recv: Any
    space: Space
    recv_space: Space
    op: Any
    comm: MPI.Comm
    counts: tuple | None
    root: int

    @property
    def writes(self) -> bool:
        """Whether this rank's recvbuf is written."""
        at_root = self.root == self.comm.rank
        return not at_root if self.collective == "broadcast" else at_root or self.collective != "reduce"

    @property
    def in_place(self) -> bool:
        """Whether the result replaces the input."""
        return self.send is self.recv

    @cached_property
    def key(self) -> tuple:
        """What tells apart the calls of one comm, as far as plans go."""
        mine = self.space.identity(self.send)
        theirs = None if self.in_place else self.recv_space.identity(self.recv)
        return self.collective, self.algorithm, mine, theirs, id(self.op), getattr(self.op, "handle", 0), self.counts, self.root


def parse(collective: str, algorithm: str | Algorithm, sendbuf: Any, recvbuf: Any, op: Any, comm: Any, counts: Any = None,
          root: Any = 0) -> Arguments:
    """Wrap what a caller passed; TypeError for what is no buffer, no number."""
    if recvbuf is None or recvbuf is MPI.IN_PLACE:
        recvbuf = sendbuf
    elif sendbuf is MPI.IN_PLACE:
        sendbuf = recvbuf
    if counts is not None:
        counts = whole_rows(counts) if collective == "alltoall" else whole(counts)
    if root.__class__ is not int:
        root = whole_root(root)
    if collective == "reduce" and recvbuf is not sendbuf and rank_of(comm) != root:
        recvbuf = sendbuf
    send, space = recv, recv_space = wrap(sendbuf, "buf" if collective == "broadcast" else "sendbuf")
    if recvbuf is not sendbuf:
        recv, recv_space = wrap(recvbuf, "recvbuf")
        if recv_space.identity(recv) == space.identity(send):
            recv = send
    return Arguments(collective, algorithm, send, recv, space, recv_space, op, comm, counts, root)


def result_of(arguments: Arguments, sendbuf: Any, recvbuf: Any) -> Any:
    """Return the array that holds the result: what the caller passed, if it is an array."""
    result = sendbuf if recvbuf is None or recvbuf is MPI.IN_PLACE else recvbuf
    return result if type(result) is type(arguments.recv) or isinstance(result, np.ndarray) else arguments.recv


def rank_of(comm: Any) -> int:
    """Return the rank that an error names: in `comm` if it is one."""
    return comm.rank if isinstance(comm, MPI.Comm) and comm else MPI.COMM_WORLD.rank


def whole(counts: Any) -> tuple[int, ...]:
    """Return counts as plain integers, for equal counts must be equal in a plan's key and in its signature."""
    try:
        return tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(f"counts is not a list of whole numbers: {counts!r}") from None


def whole_rows(counts: Any) -> tuple[tuple[int, ...], ...]:
    """As whole, for a matrix."""
    try:
        return tuple(tuple(map(operator.index, row)) for row in counts)
    except TypeError:
        raise TypeError(f"counts is not a matrix of whole numbers, a row for each sender: {counts!r}") from None


def whole_root(root: Any) -> int:
    """Return a root as a plain integer."""
    try:
        return operator.index(root)
    except TypeError:
        raise TypeError(f"root is of type {type(root).__name__}, not a rank") from None


def check_arrays(arguments: Arguments) -> None:
    """Raise TypeError or ValueError, naming the argument, for buffers that the call cannot take."""
    send, recv, collective = arguments.send, arguments.recv, arguments.collective
    single = "buf" if collective == "broadcast" else "sendbuf"
    result = "recvbuf"
    if arguments.in_place:
        result = single if collective == "broadcast" else "sendbuf (which takes the result, for there is no recvbuf)"
    if not ops.kind(recv.dtype):
        raise TypeError(f"{single if arguments.in_place else 'recvbuf'} has dtype {recv.dtype}, which is not numeric")
    if arguments.space is not arguments.recv_space:
        raise ValueError("sendbuf and recvbuf are not in the same memory: one is on a GPU, or they are on two")
    if send.dtype != recv.dtype:
        raise TypeError(f"recvbuf has dtype {recv.dtype}, but sendbuf has {send.dtype}")
    if collective in ("allreduce", "reduce") and send.shape != recv.shape:
        raise ValueError(f"recvbuf has shape {recv.shape}, but sendbuf has {send.shape}")
    if arguments.writes and arguments.space is HOST and not recv.flags.writeable:
        raise ValueError(f"{result} is read-only")
    if arguments.writes and shares_elements(recv):
        raise ValueError(f"{result} has elements that share memory (strides {recv.strides})")
    if not arguments.in_place and send.size and recv.size and arguments.space.overlap(send, recv):
        raise ValueError("sendbuf and recvbuf overlap; for a result in place of the input leave recvbuf out")
    if arguments.space is HOST:
        _check_not_freed(send, single)
        _check_not_freed(recv, "recvbuf")
    if collective == "reduce_scatter" and arguments.in_place and not send.flags.c_contiguous:
        raise ValueError("sendbuf is not contiguous, so no view of it can be the result: pass a recvbuf")


def _check_not_freed(array: Any, name: str) -> None:
    """Refuse an array whose memory the caller has given back."""
    region = memory.find(array.ctypes.data)
    if region is not None and region.freed:
        raise ValueError(f"{name} is in shared memory that was freed {region.freed}")


def shares_of(arguments: Arguments, size: int, rank: int) -> list[int]:
    """Return the elements of each chunk that the counts name, and see that the buffers hold as many: one chunk where none do."""
    if arguments.collective == "alltoall":
        return _blocks(arguments, size, rank)
    if arguments.collective not in ("reduce_scatter", "allgather"):
        return [arguments.recv.size]
    whole, own = (arguments.send, arguments.recv) if arguments.collective == "reduce_scatter" else (arguments.recv, arguments.send)
    name = "recvbuf" if arguments.collective == "reduce_scatter" else "sendbuf"
    if arguments.counts is None:
        shares = balanced(whole.size, size)
    else:
        shares = list(arguments.counts)
        if len(shares) != size or min(shares) < 0 or sum(shares) != whole.size:
            raise ValueError(f"counts {shares} are not one for each of {size} ranks, none negative, with the sum {whole.size}")
    if not arguments.in_place and own.size != shares[rank]:
        raise ValueError(f"{name} has {own.size} elements, but this rank's chunk has {shares[rank]} of {whole.size}")
    return shares


def _blocks(arguments: Arguments, size: int, rank: int) -> list[int]:
    """Return the elements of every block of an alltoall, sender by sender."""
    rows = [balanced(arguments.send.size, size)] * size if arguments.counts is None else arguments.counts
    if len(rows) != size or any(len(row) != size or min(row) < 0 for row in rows):
        raise ValueError(f"counts is not a matrix of {size} rows of {size} numbers, none negative: {[list(row) for row in rows]}")
    column = [row[rank] for row in rows]
    if arguments.send.size != sum(rows[rank]):
        raise ValueError(f"sendbuf has {arguments.send.size} elements, but row {rank} of counts has the sum {sum(rows[rank])}")
    if not arguments.in_place and arguments.recv.size != sum(column):
        raise ValueError(f"recvbuf has {arguments.recv.size} elements, but this rank receives {sum(column)}")
    odd = [(i, j) for i in range(size) for j in range(i) if rows[i][j] != rows[j][i]] if arguments.in_place else []
    if odd:                                              # seen on all ranks, so that none is left waiting
        i, j = odd[0]
        raise ValueError(f"sendbuf takes the result, for there is no recvbuf, but ranks {j} and {i} send each other blocks of "
                         f"{rows[j][i]} and {rows[i][j]} elements")
    return [count for row in rows for count in row]
