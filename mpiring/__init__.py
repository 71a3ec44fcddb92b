"""Allreduce and its siblings for NumPy and CuPy arrays under MPI, by algorithms that can be run, proven and measured."""

from mpiring.analysis.verify import verify
from mpiring.collectives import allgather, allreduce, reduce_scatter, ring_allreduce, tree_allreduce
from mpiring.errors import MismatchError, PeerError, ScheduleError
from mpiring.runtime.ops import AVERAGE
from mpiring.version import __version__

__all__ = [
    "AVERAGE",
    "MismatchError",
    "PeerError",
    "ScheduleError",
    "__version__",
    "allgather",
    "allreduce",
    "reduce_scatter",
    "ring_allreduce",
    "tree_allreduce",
    "verify",
]
