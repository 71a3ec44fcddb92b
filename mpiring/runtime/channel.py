"""What mpiring keeps for a comm: a private duplicate for its messages, settings, scratch and plans. Freed with the comm."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

from mpi4py import MPI

from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.analysis.verify import Proof, prove
from mpiring.runtime.arrays import Space
from mpiring.runtime.launcher import wrong_launcher
from mpiring.runtime.memory import Region
from mpiring.runtime.node import Node
from mpiring.runtime.topology import nodes
from mpiring.select import Table, key_for, load, override_setting
from mpiring.units import parse_size

SEGMENT = 1024 * 1024
"""Bytes of a segment between ranks on one node. Measured between 8 ranks under Open MPI and MPICH, 64 MiB: 512 KiB takes a tenth
longer, 256 KiB a quarter, more than 1 MiB gains nothing.
"""

REMOTE_SEGMENT = 60 * 1024
"""Bytes of a segment where the comm spans several nodes: few enough that Open MPI's TCP sends them at once. What is longer it asks
for, and where two nodes send to each other the answers wait behind data. Measured on links of 1 Gbit/s, 64 MiB: 560 ms between 2
nodes, 850 between 4; with 512 KiB 919 and 910; the links alone take 537 and 805.
"""

PLANNED = 16384
"""Transfers that the plans of one comm may have in all; the oldest plans go when there are more. One takes about 2 kB."""


class Cache(dict):
    """A dict that forgets its oldest entries when the sum of their lengths passes a limit."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit, self.length = limit, 0

    def put(self, key: tuple, value: Any) -> None:
        """Keep a new value, which has a length, in place of an older one; the newest one stays, however long it is."""
        if key in self:
            self.length -= self.pop(key).length
        self[key] = value
        self.length += value.length
        while self.length > self.limit and len(self) > 1:
            self.length -= self.pop(next(iter(self))).length

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self.length = 0

    def drop(self, value: Any) -> None:
        """Forget the newest value, if it is this one."""
        if self and self[key := next(reversed(self))] is value:
            self.length -= self.pop(key).length


class Inline(Executor):
    """Runs what is submitted before it returns."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        """Run a function; return what it returned or raised."""
        future: Future = Future()
        try:
            future.set_result(function(*args, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class Waits:
    """How a comm's plans wait for messages: patiently, so that the core is free for others, or not; `both`: it may change."""

    patient = both = False


class Channel:
    """A comm's private state. Its messages travel on `comm`, a duplicate, so they never meet those of the caller."""

    def __init__(self, comm: MPI.Comm, labels: Sequence[int] | None = None, parent: Channel | None = None):
        """labels: the numbers by which errors name ranks, where they are not those of `comm`. parent: whose settings hold here."""
        self.comm = comm.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size = comm.rank, comm.size
        self.labels = labels or range(self.size)
        self.tag_bits = min(31, (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) + 1).bit_length() - 1)
        self.nodes = nodes(self.comm)
        self.spread = len(set(self.nodes)) > 1
        self.beside = parent is not None                 # whether this is for a thread other than the caller's
        self.waits = parent.waits if parent else Waits()
        self.segment, self.table = (parent.segment, parent.table) if parent else self._settings()
        self.programs, self.plans = Cache(PLANNED), Cache(PLANNED)
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()      # all plans that somebody still has
        self.proofs: dict[tuple[Algorithm, Setting], Proof] = {}
        self.regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self.shares = False                              # whether shared arrays were made for this comm: all ranks know
        self.broken: str | None = None
        self._slots: dict[tuple, Any] = {}

    def _settings(self) -> tuple[int, Table]:
        """Return rank 0's settings, so that all ranks have the same; ValueError, on all ranks, where one is wrong there.

        They are the bytes of a segment, and which algorithms to choose, with what the environment says of that.
        """
        found: Any = None
        if self.rank == 0:
            try:
                table = load(key_for(MPI.get_vendor(), self.nodes)).with_override(override_setting())
                found = segment_setting() or (REMOTE_SEGMENT if self.spread else SEGMENT), table
            except ValueError as error:
                found = error
        found = self.comm.bcast(found)
        self.comm.Barrier()                              # the table is long enough for native.OVERWRITTEN
        if isinstance(found, ValueError):
            self.comm.Free()
            raise ValueError(f"rank 0: {found}")
        return found

    @cached_property
    def layout(self) -> Setting:
        """How the ranks lie on their nodes."""
        return Setting(self.size, nodes=tuple(self.nodes))

    @cached_property
    def node(self) -> Node | None:
        """What this rank's node shares; None, on all ranks, where the ranks of a node cannot share memory. Collective at first."""
        node = Node(self.comm, self.nodes, threaded=self.beside)
        if not self.comm.allreduce(node.mapping is not None, MPI.LAND):
            node.free()
            return None
        return node

    @cached_property
    def lane(self) -> Channel | None:
        """The channel of the ranks with this one's place on every node; None for ranks that the smallest node has no place for.

        Collective at first.
        """
        node, place = self.layout.places[self.rank]
        comm = self.comm.Split(place if place < self.layout.lanes else MPI.UNDEFINED, node)
        if comm == MPI.COMM_NULL:
            return None
        channel = Channel(comm, [ranks[place] for ranks in self.layout.members], self)
        comm.Free()
        return channel

    @cached_property
    def background(self) -> Channel:
        """A channel for what runs beside the caller. Collective at first.

        Whatever ranks make together, they make here: later on the channel's thread may be in a collective of the same comm.
        """
        channel = Channel(self.comm, parent=self)
        channel.shares = self.shares
        if channel.node and channel.spread:
            _ = channel.lane
        return channel

    @cached_property
    def worker(self) -> Executor:
        """Runs plans one after the other beside the caller; where MPI is not for several threads, at once."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return Inline()
        return ThreadPoolExecutor(1, "mpiring")

    def proof(self, algorithm: Algorithm, setting: Setting) -> Proof:
        """Return an algorithm's proof, made once; ScheduleError where it is wrong."""
        if (algorithm, setting) not in self.proofs:
            self.proofs[algorithm, setting] = prove(algorithm, setting)
        return self.proofs[algorithm, setting]

    def slot(self, space: Space, index: int, nbytes: int, host: bool) -> Any:
        """Return scratch by its index, of a segment or more; plans of one comm share it, for they run one after the other."""
        key = (space, index, host)
        if key not in self._slots or self._slots[key].nbytes < nbytes:
            self._slots[key] = (space.host_scratch if host else space.scratch)(max(nbytes, self.segment))
        return self._slots[key]

    def free(self) -> None:
        """Let go of the duplicate and all that hangs on it."""
        self.broken = "it was freed"
        for region in list(self.regions):
            region.retire("with its comm")
        if "worker" in self.__dict__:                    # what is under way ends first
            self.worker.shutdown()
        for part in ("background", "lane", "node"):
            if self.__dict__.get(part) is not None:
                self.__dict__.pop(part).free()
        for plan in list(self.made):                     # whoever still knows one must not run it, nor keep its scratch
            plan.retire("with its comm")
        self.plans.clear()
        self.programs.clear()
        self._slots.clear()
        self.comm.Free()


def segment_setting() -> int | None:
    """Return the bytes of a segment that MPIRING_SEGMENT asks for (digits, with K or M), if it does."""
    text = os.environ.get("MPIRING_SEGMENT", "")
    if not text:
        return None
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if not 64 <= size <= 1 << 30:
        raise ValueError(f"MPIRING_SEGMENT is {text!r}, not a number of bytes from 64 to 1024M such as 65536, 512K or 2M")
    return size


def check_comm(comm: Any) -> None:
    """Raise TypeError or ValueError for what is no intra-communicator."""
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an MPI communicator")
    if not comm:
        raise ValueError("comm is MPI.COMM_NULL: was it freed, or is this rank not part of it?")
    if comm.Is_inter():
        raise ValueError("comm is an inter-communicator; use one of its groups, or its Merge()")


def _free(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    channel.free()


@cache
def channel_key() -> int:
    """Return the key of the MPI attribute by which a channel hangs on its comm; made when MPI is surely initialised."""
    return MPI.Comm.Create_keyval(delete_fn=_free)


if MPI.Is_initialized():     # as nearly always: then no two threads can make two keys
    channel_key()


def channel_of(comm: MPI.Comm) -> Channel:
    """Return the comm's channel; the first call on a comm makes it, together with all its ranks."""
    channel = comm.Get_attr(channel_key())
    if channel is None:
        if problem := wrong_launcher(comm):
            warnings.warn(problem, RuntimeWarning, stacklevel=4)
        channel = Channel(comm)
        comm.Set_attr(channel_key(), channel)
    return channel
