"""Allreduce and its siblings for NumPy and CuPy arrays under MPI, by algorithms that can be run, proven, priced and drawn."""

from importlib import import_module
from typing import Any

from mpiring.version import __version__

_HOMES = {
    "ADASUM": "runtime.ops",
    "AVERAGE": "runtime.ops",
    "Algorithm": "algorithms.registry",
    "Engine": "engine.engine",
    "IDLE": "algorithms.step",
    "MismatchError": "errors",
    "PeerError": "errors",
    "Ring": "algorithms.setting",
    "ProcessSet": "engine.process_sets",
    "ScheduleError": "errors",
    "ShutdownError": "errors",
    "StallError": "errors",
    "Step": "algorithms.step",
    "allgather": "collectives",
    "allreduce": "collectives",
    "allreduce_init": "requests",
    "alltoall": "collectives",
    "broadcast": "collectives",
    "empty": "arrays",
    "empty_like": "arrays",
    "free": "arrays",
    "iallreduce": "requests",
    "init": "engine.default",
    "is_initialized": "engine.default",
    "multi_ring_over": "algorithms.registry",
    "reduce": "collectives",
    "reduce_scatter": "collectives",
    "ring_allreduce": "collectives",
    "shutdown": "engine.default",
    "tree_allreduce": "collectives",
    "verify": "analysis.verify",
    "zeros": "arrays",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for first: proofs and prices need no MPI."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mpiring' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"mpiring.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
