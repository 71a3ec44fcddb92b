"""Collectives among ranks that reach each other's memory: jobs bound to buffers, done between barriers.

The first barrier of a run shows what every rank brings: its line on the node's board says which call it makes and where its
buffers lie. All ranks see the same board, so they raise the same error, or take the same way to each other's vectors (binding.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import numpy as np

from mpiring.algorithms.shared import Work, jobs
from mpiring.errors import MismatchError, PeerError
from mpiring.runtime import ops
from mpiring.runtime.binding import ONE_PASS, PRIVATE, PROCESS_VM, STAGED, UNREACHABLE, Binder, Buffer, Layout, Side
from mpiring.runtime.channel import Channel
from mpiring.runtime.plan import Call, Plan, Task
from mpiring.runtime.relay import Relay

PRIVATE_FROM = 128 << 20
"""Bytes of all vectors of a node together from which on private ones are read and written by the kernel rather than staged, where
that is permitted. Measured under Open MPI and Intel MPI: 2 ranks take as long either way at 64 MiB each, and a fifth less staged at
16; 4 are even at 16 to 32 MiB; 8 take a tenth less by the kernel at 16 MiB, a fifth less at 64, and a fifth more at 4. Between
nodes, where the network sets the pace, staging takes a tenth less (64 MiB, 2 ranks on each of 4 nodes, 1 Gbit/s).
"""

KNOWN = 4
"""Boards for which a plan keeps what it has bound, for callers whose peers change between buffers."""


class Meeting(NamedTuple):
    """What the ranks make of the board: the path, the sides of all, and which of them have packed their first segment."""

    path: str
    sends: list[Side]
    recvs: list[Side]
    early: list[bool]


class SharedPlan:
    """One collective call bound to its buffers; made once, run many times.

    work: the call as the ranks of this node see it. lane: what Relay wants to know of this rank's lane, if it has one.
    """

    algorithm = "shared"

    def __init__(self, channel: Channel, call: Call, operation: ops.Operation | None, sendbuf: np.ndarray, recvbuf: np.ndarray,
                 work: Work, lane: tuple[Callable[[np.ndarray], Plan], Plan | None] | None = None):
        self.channel, self.call, self.work, self.node = channel, call, work, channel.node
        self.operation, self.dtype, self.path, self.gone = operation, recvbuf.dtype, "", ""
        self.relay = Relay(channel.worker, *lane) if lane else None
        self.signature = crc32(str(call).encode())
        self.jobs = [jobs(work, rank) for rank in range(work.size)]
        self.layout = Layout(work, self.jobs, self.dtype.itemsize)
        in_place, own = sendbuf is recvbuf, sum(work.shares[:self.node.rank])
        self.send = Buffer(sendbuf, own if call.collective == "allgather" and not in_place else 0)
        self.recv = self.send if in_place else Buffer(recvbuf, own if call.collective == "reduce_scatter" else 0)
        # What a job of an alltoall in place writes, another still has to read.
        self.touchable = not (in_place and call.collective == "alltoall")
        vectors = 1 if call.collective == "alltoall" else work.size          # whose shares are those of all ranks already
        self.large = not work.lanes and vectors * sum(work.shares) * self.dtype.itemsize >= PRIVATE_FROM
        self.line, self.packs = self._line()
        self.segments = max(1, self.layout.segments(self.jobs[self.node.rank]))
        if self.relay:                                   # there must be a plan, if only to tell the lane that this rank gives up
            self.relay.submit(Binder(self, None).relayed(0))
        self.seen, self.known = b"", {}
        self.phases: list[list[Task]] = []
        self.last: list[Task] = []
        self.length = 1 + sum(map(len, self.jobs))

    def __call__(self) -> None:
        """Run. On an error all ranks of the node know, and nothing is left pending; what recvbuf holds then is undefined."""
        if self.channel.broken or self.gone:
            raise RuntimeError(self._unusable())
        node = self.node
        barrier, quiet = node.barrier, node.quiet
        error: BaseException | None = None
        if self.relay:
            self.relay.begin(self.segments)
        try:
            node.line[:] = self.line
            for task, args in self.packs:
                task(*args)
            barrier()
            if node.board.tobytes() != self.seen:
                self._meet()
            for turn, phase in enumerate(self.phases):
                flags = node.flags[turn & 1]
                try:
                    for task, args in phase:
                        task(*args)
                except BaseException as caught:          # an interrupt as well: the others come to the barrier
                    error, flags[node.rank] = caught, 1
                barrier()
                if flags.tobytes() != quiet:
                    error = self._failed(error, flags)
                    raise error
            for task, args in self.last:
                task(*args)
        except MismatchError:
            raise
        except BaseException as caught:
            if caught is not error:                      # in a barrier, perhaps: where the others are is not known
                node.leave()
                self.channel.broken = f"{type(caught).__name__} in {self.call}: {caught}"
            raise

    def retire(self, how: str) -> None:
        """Take note that the memory of a buffer is not shared any more."""
        self.gone = how
        self.known.clear()
        self.packs, self.phases, self.last = [], [], []

    def _unusable(self) -> str:
        if self.channel.broken:
            return f"this comm cannot be used any more ({self.channel.broken}); use a duplicate of it"
        return f"a shared array of this plan was freed {self.gone}"

    def _line(self) -> tuple[bytes, list[Task]]:
        """Return what goes on the board, and the tasks that pack the first segment if nothing else can follow."""
        send, recv = (buffer.side() if self.touchable else Side(UNREACHABLE) for buffer in (self.send, self.recv))
        early = send.region <= PRIVATE and not (self.large and self.node.private and send.region == PRIVATE)
        if early:                                        # where it lies does not matter, so the board need not change with it
            send, recv = Side(send.region), Side(min(recv.region, PRIVATE))
        line = np.array([self.signature, *send, *recv, early], np.int64).tobytes()
        return line, Binder(self, None).pack(0) if early else []

    def _meet(self) -> None:
        """Bind to what the ranks bring; called where the board is not what it was the last time, which all see alike."""
        seen = self.node.board.tobytes()
        if seen not in self.known:
            lines = np.frombuffer(seen, np.int64).reshape(self.node.size, -1)
            if (lines[:, 0] != self.signature).any():
                raise self._mismatch()
            if len(self.known) >= KNOWN:
                self.known.clear()
            meeting = self._meeting(lines)
            self.known[seen] = meeting.path, *Binder(self, meeting).phases()
        self.path, self.phases, self.last = self.known[seen]
        self.seen = seen

    def _meeting(self, lines: np.ndarray) -> Meeting:
        """Choose the path: a pure function of the board."""
        sends, recvs = ([Side(*line) for line in lines[:, start:start + 3].tolist()] for start in (1, 4))
        work = [(rank, job) for rank, found in enumerate(self.jobs) for job in found]
        given = {sends[peer].region for _, job in work for peer, _ in job.sources}
        taken = {recvs[peer].region for _, job in work for peer, _ in job.targets}
        away = {recvs[peer].region for rank, job in work for peer, _ in job.targets if peer != rank}
        # Who passes an array of a region surely has it mapped.
        held = [{sends[rank].region, recvs[rank].region} for rank, found in enumerate(self.jobs) if found]
        mapped = all(number > PRIVATE and all(number in numbers for numbers in held) for number in given | away)
        path = STAGED
        if UNREACHABLE not in given | taken:
            path = ONE_PASS if mapped else PROCESS_VM if self.large and self.node.private else STAGED
        return Meeting(path, sends, recvs, lines[:, 7].astype(bool).tolist())

    def _mismatch(self) -> MismatchError:
        calls = self.node.comm.allgather(str(self.call))
        error = MismatchError(f"{self.call} on rank {self.channel.rank}: ranks disagree: " + "; ".join(
            f"rank {rank} called {call}" for rank, call in zip(self.node.ranks, calls)))
        if self.relay:
            self.relay.abort(error)
        return error

    def _failed(self, error: BaseException | None, flags: memoryview) -> BaseException:
        """Let this node's ranks know, then the lane's on other nodes; return what to raise here."""
        found = self.node.comm.allgather(None if error is None else (type(error).__name__, str(error)))
        flags[self.node.rank] = 0                        # all have seen it by now
        if error is None:
            reports = [(rank, *report) for rank, report in zip(self.node.ranks, found) if report]
            kind = MismatchError if any(name == "MismatchError" for _, name, _ in reports) else PeerError
            error = kind(f"{self.call} on rank {self.channel.rank}: another rank gave up: "
                         + "; ".join(f"rank {rank}: {name}: {text}" for rank, name, text in reports))
        if self.relay:
            self.relay.abort(error)
        return error
