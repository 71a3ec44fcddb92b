"""What the launcher says of this process, in its environment: to notice a launcher of one MPI with the library of another."""

from __future__ import annotations

import os

SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
"""Set by Open MPI's mpirun; by MPICH's and Intel MPI's; by both of these for the ranks on this node."""


def launched_size() -> int:
    """Return the number of ranks that the launcher started, 1 if none did."""
    return max([int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, "").isdigit()], default=1)
