"""The engine that a program has by default: mpiring.init() makes it, mpiring.shutdown() ends it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpiring.engine.engine import Engine

_engine: Engine | None = None


def init(comm: MPI.Comm | None = None, **options: Any) -> Engine:
    """Return the program's engine; the first call makes it, together with all ranks. Arguments as for Engine, then of no effect."""
    global _engine
    if _engine is None or _engine.closed:
        _engine = Engine(comm, **options)
    return _engine


def shutdown() -> None:
    """End the program's engine, if there is one; see Engine.shutdown. init() may be called again."""
    global _engine
    engine, _engine = _engine, None
    if engine is not None:
        engine.shutdown()


def is_initialized() -> bool:
    """Tell whether there is an engine by init() that has not been shut down."""
    return _engine is not None and not _engine.closed
