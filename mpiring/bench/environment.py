"""Where a bench runs: what its header says and its JSON records."""

from __future__ import annotations

import os
import platform
from collections import Counter
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.runtime.channel import channel_of

LEVELS = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED",
          MPI.THREAD_MULTIPLE: "MULTIPLE"}


def describe(comm: MPI.Comm) -> dict[str, Any]:
    """Describe libraries and machine; collective."""
    channel = channel_of(comm)
    together = Counter(channel.nodes)
    library, version = MPI.get_vendor()
    return {
        "mpiring": mpiring.__version__, "library": f"{library} {'.'.join(map(str, version))}", "mpi4py": mpi4py.__version__,
        "numpy": np.__version__, "python": platform.python_version(), "thread_level": LEVELS[MPI.Query_thread()],
        "ranks": comm.size, "nodes": len(together), "ranks_per_node": max(together.values()),
        "cores": os.cpu_count(), "segment": channel.segment,
    }


def header(environment: dict[str, Any]) -> list[str]:
    """Return the lines that head a table."""
    lines = [
        "mpiring {mpiring} on {library}, mpi4py {mpi4py}, NumPy {numpy}, Python {python}, thread level {thread_level}"
        .format(**environment),
        "{ranks} ranks on {nodes} node(s) with {cores} cores, ".format(**environment) + _kind(environment),
    ]
    if environment["ranks_per_node"] > environment["cores"]:
        lines.append(f"WARNING: {environment['ranks_per_node']} ranks share {environment['cores']} cores: times say how the ranks "
                     "take turns; compare them with each other only")
    return lines


def _kind(environment: dict[str, Any]) -> str:
    if "torch" in environment:
        return f"PyTorch {environment['torch']} with one thread a rank"
    return f"{environment['buffers']} buffers{', in place' if environment['inplace'] else ''}"
