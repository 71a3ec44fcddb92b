"""A plan: a program bound to a buffer, an op and a comm. Made once, run many times; running it makes no array."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from mpi4py import MPI

from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space, Vector
from mpiring.runtime.channel import Channel
from mpiring.runtime.copying import copy
from mpiring.runtime.giveup import FLAG_BITS, LAST, Unexpected, give_up
from mpiring.runtime.program import Average, Combine, Copy, Piece, Program, Slot

Task = tuple[Callable[..., Any], tuple]


SPIN, NAP = 2e-5, 3e-4
"""Seconds of a patient wait before it sleeps, and of each sleep: in that, a link of 1 Gbit/s carries what a socket buffers."""

LOOKS = 4
"""Looks between two sleeps: in one, Open MPI reads no more than a part of one message from a socket (measured: a message of 8 bytes
between two nodes takes two)."""


@dataclass(frozen=True)
class Call:
    """One collective call in values that must be equal on all ranks; `whole`: the one of which it does a part."""

    collective: str
    algorithm: str
    count: int
    dtype: str
    op: str
    counts: tuple[int, ...] | None = None
    root: int | None = None
    whole: str = ""

    def __str__(self) -> str:
        shares = f", counts {list(self.counts)}" if self.counts is not None else ""
        op = f", {self.op}" if self.op else ""
        root = f", root {self.root}" if self.root is not None else ""
        whole = f" of {self.whole}" if self.whole else ""
        return f"{self.collective}({self.algorithm}, count {self.count}{shares}, {self.dtype}{op}{root}){whole}"


class Move(NamedTuple):
    """A transfer with its buffers: what the loop below does in one iteration."""

    packs: list[Task]                                        # copies that must be over before a send of this iteration
    exchange: tuple | None                                   # the arguments of Sendrecv, where nothing is to be begun early or late
    posts: list[tuple[int, tuple, int]]                      # else the receives to post: index, buffer, peer,
    starts: list[tuple[int, tuple, int, int]]                # the sends to start: index, buffer, peer, tag,
    ahead: list[Task]                                        # and copies for the next iteration's send, started now
    receives: bool
    tag: int                                                 # what the awaited message must carry
    nbytes: int
    sends: bool
    after: list[Task]                                        # reduce, or copy into place


def patiently(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Wait for a message asleep between looks, but for the first moment: MPI's own wait keeps a core busy, which others want."""
    until, looks = time.perf_counter() + SPIN, 0
    while not request.Test(status):
        looks += 1
        if time.perf_counter() < until:
            time.sleep(0)
        elif looks % LOOKS == 0:
            time.sleep(NAP)


class Plan:
    """Runs a program on one pair of buffers. Every message carries a signature of the call, so ranks that disagree notice."""

    def __init__(self, channel: Channel, call: Call, program: Program, operation: ops.Operation | None, space: Space,
                 sendbuf: Any, recvbuf: Any):
        self.channel, self.call, self.transfers, self.space = channel, call, program.transfers, space
        self.algorithm, self.path, self.gone = call.algorithm, "messages", ""
        self.length = program.length
        bits = min(channel.tag_bits, 26) - FLAG_BITS
        self.signature = crc32(f"{call} {channel.segment}".encode()) % (1 << bits) << FLAG_BITS
        self.status = MPI.Status()
        binder = _Binder(channel, program, operation, space, sendbuf, recvbuf)
        self.moves = list(self._moves(binder))

    def __call__(self) -> None:
        """Run. On an error the other ranks are told and nothing is left pending; what recvbuf holds then is undefined."""
        if self.channel.broken:
            raise RuntimeError(f"this comm cannot be used any more ({self.channel.broken}); use a duplicate of it")
        comm, status, settle = self.channel.comm, self.status, self.space.settle
        irecv, isend, sendrecv, any_tag = comm.Irecv, comm.Isend, comm.Sendrecv, MPI.ANY_TAG
        patient = self.channel.waits.patient
        recvs: list[Any] = [None] * len(self.moves)
        sends: list[Any] = [None] * len(self.moves)
        i = 0
        try:
            for i, (packs, exchange, posts, starts, ahead, receives, tag, nbytes, waits, after) in enumerate(self.moves):
                for task, args in packs:
                    task(*args)
                if settle:
                    settle()
                if exchange:
                    sendrecv(*exchange)
                    sends[i] = False
                else:
                    for j, buffer, peer in posts:
                        recvs[j] = irecv(buffer, peer, any_tag)
                    for j, buffer, peer, send_tag in starts:
                        sends[j] = isend(buffer, peer, send_tag)
                    for task, args in ahead:
                        task(*args)
                    if receives:
                        patiently(recvs[i], status) if patient else recvs[i].Wait(status)
                    if waits:
                        patiently(sends[i]) if patient else sends[i].Wait()
                        sends[i] = False
                if receives:
                    if status.tag != tag or status.count != nbytes:
                        raise Unexpected(status.tag, status.count)
                    recvs[i] = False
                for task, args in after:
                    task(*args)
            if settle:
                settle()
        except BaseException as error:
            raise give_up(self, i, recvs, sends, error) from (None if isinstance(error, (Unexpected, MPI.Exception)) else error)

    def retire(self, how: str) -> None:
        """Take note that the comm was freed."""
        self.gone = how

    def _moves(self, binder: _Binder) -> Iterator[Move]:
        posts, starts, packs, ahead = ([[] for _ in self.transfers] for _ in range(4))
        nbytes = []
        for j, transfer in enumerate(self.transfers):
            nbytes.append(0)
            if transfer.recv_from is not None:
                buffer = binder.room(transfer.recv)
                nbytes[j] = (transfer.recv.stop - transfer.recv.start) * binder.dtype.itemsize
                posts[transfer.post_at].append((j, buffer, transfer.recv_from))
            if transfer.send_to is not None:
                tag = self.signature | (LAST if transfer.send_last else 0)
                starts[transfer.start_at].append((j, binder.message(transfer.send), transfer.send_to, tag))
            early = transfer.pack_at < transfer.start_at
            (ahead if early else packs)[transfer.pack_at].extend(binder.tasks(transfer.pack))
        for j, transfer in enumerate(self.transfers):
            receives, waits = transfer.recv_from is not None, transfer.send_to is not None
            tag = self.signature | (LAST if transfer.recv_last else 0)
            exchange = None
            alone = [post[0] for post in posts[j]] == [start[0] for start in starts[j]] == [j]
            if alone and not ahead[j] and not self.channel.waits.both:
                (_, recv, source), (_, send, dest, send_tag) = posts[j][0], starts[j][0]
                exchange = send, dest, send_tag, recv, source, MPI.ANY_TAG, self.status
            after = list(binder.tasks(transfer.after))
            yield Move(packs[j], exchange, posts[j], starts[j], ahead[j], receives, tag, nbytes[j], waits, after)


class _Binder:
    """Turns pieces into views and actions into calls."""

    def __init__(self, channel: Channel, program: Program, operation: ops.Operation | None, space: Space, sendbuf: Any,
                 recvbuf: Any):
        self.space, self.dtype = space, recvbuf.dtype
        self.vectors = {program.send: Vector(space.alias(sendbuf)), program.recv: Vector(space.alias(recvbuf))}
        needs = ((False, program.slots), (True, program.host_slots))
        self.scratch = {host: [channel.slot(space, index, length * self.dtype.itemsize, host)
                               for index, length in enumerate(lengths)] for host, lengths in needs}
        self.slots = {host: [self._typed(scratch, length) for scratch, length in zip(self.scratch[host], lengths)]
                      for host, lengths in needs}
        self.combine = operation and operation.combine(space.xp, self.dtype)
        self.divide = operation and operation.average and ops.divide(space.xp, self.dtype, channel.size)

    def _typed(self, scratch: Any, length: int) -> Any:
        return scratch[:length * self.dtype.itemsize].view(self.dtype)

    def message(self, piece: Piece) -> tuple[Any, int, MPI.Datatype]:
        """Return a flat piece as MPI takes it: bytes."""
        if piece.start == piece.stop:
            return b"", 0, MPI.BYTE     # a buffer that is not flat has no view of nothing, and MPI may not reach it
        view = self.flat(piece).view("u1")
        return view, view.nbytes, MPI.BYTE

    def room(self, piece: Piece) -> tuple[Any, int, MPI.Datatype]:
        """Return where a message lands: all of a slot, so that there is room for any, or the exact place in recvbuf."""
        if not isinstance(piece.region, Slot):
            return self.message(piece)
        scratch = self.scratch[piece.region.host][piece.region.index]
        return scratch, scratch.nbytes, MPI.BYTE

    def flat(self, piece: Piece) -> Any:
        """Return the one view of a piece that lies in one place."""
        if isinstance(piece.region, Slot):
            return self.slots[piece.region.host][piece.region.index][piece.start:piece.stop]
        return next(self.vectors[piece.region].pieces(piece.start, piece.stop))[0]

    def tasks(self, actions: list) -> Iterator[Task]:
        for action in actions:
            if isinstance(action, Copy):
                for target, source in self._pairs(action.target, action.source):
                    yield copy(target, source) if self.space is HOST else (self.space.copy, (target, source))
            elif isinstance(action, Combine):
                for operands in self._triples(action):
                    yield self.combine, operands
            elif isinstance(action, Average):
                for view, _, _ in self._views(action.target):
                    yield self.divide, (view,)

    def _views(self, piece: Piece) -> Iterator[tuple[Any, int, int]]:
        if isinstance(piece.region, Slot):
            yield self.flat(piece), 0, piece.stop - piece.start
        else:
            yield from self.vectors[piece.region].pieces(piece.start, piece.stop)

    def _pairs(self, target: Piece, source: Piece) -> Iterator[tuple[Any, Any]]:
        """Match a flat piece with the views of the other."""
        if target.region.flat:
            line = self.flat(target)
            yield from ((line[a:b].reshape(view.shape), view) for view, a, b in self._views(source))
        else:
            line = self.flat(source)
            yield from ((view, line[a:b].reshape(view.shape)) for view, a, b in self._views(target))

    def _triples(self, action: Combine) -> Iterator[tuple[Any, Any, Any]]:
        """Yield left operand, right operand and result."""
        order = slice(None, None, 1 if action.first else -1)
        if action.held.region.flat:
            views = {piece: self.flat(piece) for piece in action[:3]}   # one view a place: CuPy copies overlapping operands
            yield *(views[action.incoming], views[action.held])[order], views[action.target]
            return
        for part, held in self._pairs(action.incoming, action.held):
            yield *(part, held)[order], part
