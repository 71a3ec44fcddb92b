"""Horovod's interface for PyTorch, on mpiring."""

from typing import Any

from mpiring.horovod import names

__version__ = "0.28.1"
"""Of the Horovod whose interface this is: programs compare it."""

names.install()


def run(*_: Any, **__: Any) -> None:
    """Say what to use: Horovod starts ranks by this function from a process that is none."""
    raise NotImplementedError("mpiring has no horovod.run: MPI's launcher starts the ranks. Put the call of the function into a "
                              "program, and run that by: mpirun -np N python -m mpiring.horovod program.py")
