"""A barrier of a node's ranks in memory that they share: half the time, or less, of MPI's where there are more ranks than cores."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpiring.errors import PeerError

ORDERED = ("x86_64", "AMD64", "i686")
"""Processors on which a core's writes become visible in the order in which it made them, as plain writes in Python have to."""

YIELDS, PROGRESS, PAUSE = 256, 8, 3e-5
"""How often a rank gives its core to others before it sleeps between looks, at which of those looks it also lets MPI make progress,
and the seconds of a sleep. A look takes half a microsecond, a sleep as short as this about 80.
"""

LEFT = 255
"""What a rank writes instead of its turn if it will never call again."""


give_way = ctypes.CDLL(None).sched_yield
"""Give the core to others, and the GIL to other threads too, which os.sched_yield keeps."""


def barrier(comm: MPI.Comm, arrived: memoryview, labels: Sequence[int]) -> Callable[[], None]:
    """Return the function that waits until all ranks of `comm` have called it; PeerError where one of them has LEFT for good.

    arrived: zeroed bytes that all ranks have mapped, one for each. labels: the numbers by which an error names ranks.

    MPI's own barrier serves where plain writes could overtake. It is also what to take where another thread of the rank waits in
    MPI meanwhile: looks leave that one less of the core than a wait does (64 MiB between 4 nodes took up to 3 times as long).
    """
    if platform.machine() not in ORDERED:
        return comm.Barrier
    rank, turn, progress, sleep = comm.rank, 0, comm.Iprobe, time.sleep

    def wait() -> None:
        """Write which turn it is, out of three: others may be one ahead, and none is two behind."""
        nonlocal turn
        before = turn
        arrived[rank] = turn = (turn + 1) % 3
        looks = 0
        while before in (now := arrived.tobytes()):
            looks += 1
            if looks < YIELDS:
                give_way()
                if looks % PROGRESS == 0:                # peers may need it of messages that the caller has under way
                    progress()
            else:                                        # it will be a while: leave core and GIL to who can use them
                progress()
                sleep(PAUSE)
        if LEFT in now:
            raise PeerError(f"rank {labels[now.index(LEFT)]} was interrupted in a call")

    return wait
