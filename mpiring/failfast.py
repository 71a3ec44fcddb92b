"""End the whole job when one rank fails: its traceback once, named by rank, then MPI's Abort.

Otherwise the others wait for it, in a collective or in MPI_Finalize, until somebody kills the job. `install` sees to exceptions
that nobody catches; `python -m mpiring.run` also to sys.exit with a status, of which a program can learn nothing.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

from mpiring.__main__ import INTERRUPTED, RANKS

PAUSE = 0.2
"""Seconds for the launcher to pass on what this rank wrote: MPICH's and Intel's drop what they have not read when a rank aborts."""

LAUNCHER = "PMI_FD"
"""The environment variable that has the descriptor of a pipe to the launcher, in MPICH and Intel MPI."""


def install() -> None:
    """End the job from now on when an exception leaves the main thread of this process.

    Nothing changes in an interactive session, for a rank that is alone, and on the second call. A program that afterwards sets a
    hook of its own, which does not call the one before it, takes this away again, though not from mpiring.run.
    """
    if not (isinstance(sys.excepthook, _Hook) or _interactive()):
        sys.excepthook = _Hook(sys.excepthook)


def end_job(error: BaseException | None, trace: TracebackType | None, hook: Any = None) -> int:
    """Say what ends this rank, if it is an error, and end all ranks; return the exit status where that is left to Python.

    hook: what writes the traceback, called like sys.excepthook; default: sys.excepthook itself.
    """
    status, who = _status(error), _name()
    try:
        if status:
            _flush()
            _say(error, trace, status, who, hook or sys.excepthook)
    finally:                                             # although a hook of the program's may exit
        if os.getpid() != _PROCESS:
            _end_child(status)
        elif status and who:
            _end_all(status)
    return status


class _Hook:
    """Takes the place of sys.excepthook."""

    def __init__(self, before: Any):
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_job(error, trace, self.before)


_PROCESS = os.getpid()
"""The rank's. Processes that it forks have another number."""


def _end_child(status: int) -> None:
    """End a forked process by itself: Python's own end would have it shut MPI down, which is not for it to do."""
    _flush()
    if "mpi4py.MPI" in sys.modules:
        os._exit(status)


def _end_all(status: int) -> None:
    """Abort. Where MPI has not begun, say to the launcher what an Abort says: a status alone ends the others in Open MPI only."""
    time.sleep(PAUSE)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        mpi.COMM_WORLD.Abort(status)
        os._exit(status)                                 # MPICH's comes back, while the launcher is about to end all
    if os.environ.get(LAUNCHER, "").isdigit():
        with suppress(OSError):
            os.write(int(os.environ[LAUNCHER]), f"cmd=abort exitcode={status}\n".encode())


def _status(error: BaseException | None) -> int:
    """Return the exit status that Python would end with."""
    if isinstance(error, SystemExit):
        error = error.code
    if isinstance(error, int):
        return error & 0xFF
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error is not None)


def _say(error: BaseException, trace: TracebackType | None, status: int, who: str, hook: Any) -> None:
    """Write the traceback as one piece, so that two ranks' do not mingle; if the program has a hook of its own, that writes it."""
    if isinstance(hook, _Hook):
        hook = hook.before
    if isinstance(error, SystemExit):
        text = "" if isinstance(error.code, int) else f"{error.code}\n"
        return _write(f"{text}{who} ends the job with exit status {status}\n" if who else text)
    title = f"{who} ends the job:\n" if who else ""
    if hook is sys.__excepthook__:
        return _write(title + "".join(traceback.format_exception(type(error), error, trace)))
    _write(title)
    try:
        hook(type(error), error, trace)
    except Exception:
        _write("".join(traceback.format_exception(type(error), error, trace)) + traceback.format_exc())
    return None


def _write(text: str) -> None:
    with suppress(Exception):                            # a pipe that nobody reads any more
        sys.stderr.write(text)
        sys.stderr.flush()


def _flush() -> None:
    with suppress(Exception):
        sys.stdout.flush()


def _name() -> str:
    """Return which rank this is; '' for one that is alone, or not a rank: a forked process, one where MPI is over."""
    mpi = sys.modules.get("mpi4py.MPI")
    if os.getpid() != _PROCESS or (mpi is not None and mpi.Is_finalized()):
        return ""
    if mpi is not None and mpi.Is_initialized():
        return f"rank {mpi.COMM_WORLD.rank} of {mpi.COMM_WORLD.size}" if mpi.COMM_WORLD.size > 1 else ""
    return next((f"rank {os.environ[name]}" for name in RANKS if name in os.environ), "")


def _interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
