"""What the launcher says of this process, in its environment: to notice a launcher of one MPI with the library of another."""

from __future__ import annotations

import os

from mpi4py import MPI

SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by Open MPI's mpirun; by MPICH's and Intel MPI's; by both of these for the ranks on this node."""


def wrong_launcher(comm: MPI.Comm) -> str:
    """Return what is wrong if the launcher started more ranks than the MPI library knows of, else ''."""
    launched = launched_size() if comm.size == MPI.COMM_WORLD.size == 1 else 1
    if launched == 1:
        return ""
    return (f"launched as one of {launched} ranks, but {MPI.get_vendor()[0]} knows of one only: mpirun is of another MPI "
            "than the library that mpi4py loads. Use the mpirun of the same environment.")


def launched_size() -> int:
    """Return the number of ranks that the launcher started, 1 if none did."""
    return max([int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()], default=1)
