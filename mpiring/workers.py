"""Processes that a rank has started afresh, by multiprocessing or otherwise: they may import what it imports, but are not ranks."""

from __future__ import annotations

import multiprocessing
import os

RANK = "_MPIRING_RANK"
"""The environment variable by which a rank's children know its launcher's words, and the number of its process."""

LAUNCHED = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD")
"""What launchers tell a rank of itself; its children inherit that."""


def leave_mpi_alone() -> None:
    """Keep mpi4py.MPI from initialising MPI in such a process: the library would take it for the rank that started it.

    Modules that need MPI can be imported then; what communicates cannot be used. Call this before mpi4py.MPI is imported first.
    """
    if (multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False)
            or _started_by_rank()):
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False


def _started_by_rank() -> bool:
    """Tell whether a process with a rank's words from the launcher has been here before this one; the first is the rank."""
    words = [os.environ.get(name, "") for name in LAUNCHED]
    if not any(words):
        return False
    job, mine = ":".join(words), ":".join([*words, str(os.getpid())])
    before = os.environ.get(RANK, "")
    if before.rpartition(":")[0] == job and before != mine:
        return True
    os.environ[RANK] = mine
    return False
