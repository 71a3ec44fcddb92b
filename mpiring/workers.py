"""Processes that multiprocessing has started from a rank, afresh: they import the rank's program, but are not ranks."""

from __future__ import annotations

import multiprocessing


def leave_mpi_alone() -> None:
    """Keep mpi4py.MPI from initialising MPI in such a process: the library would take it for the rank that started it.

    Modules that need MPI can be imported then; what communicates cannot be used. Call this before mpi4py.MPI is imported first.
    """
    if multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
