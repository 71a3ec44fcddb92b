"""Which ranks are together on a node."""

from __future__ import annotations

from mpi4py import MPI


def nodes(comm: MPI.Comm) -> list[int]:
    """Return the node of every rank, numbered in the order of their first ranks: ranks with one host name share it. Collective."""
    names = comm.allgather(MPI.Get_processor_name())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
