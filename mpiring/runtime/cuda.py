"""Ask whether MPI can read GPU memory. It is asked, never tried: an MPI that cannot would crash."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from mpi4py import MPI


@lru_cache(maxsize=1)
def cuda_aware() -> bool:
    """Tell whether the MPI library takes device pointers: MPIRING_CUDA_AWARE, else the comm's info, else the library's report."""
    override = os.environ.get("MPIRING_CUDA_AWARE", "")
    if override not in ("", "0", "1"):
        raise ValueError(f"MPIRING_CUDA_AWARE is {override!r}, not 0 or 1")
    if override:
        return override == "1"
    return _info_says() or _library_says()


def _info_says() -> bool:
    """MPI 4.1: the info key mpi_memory_alloc_kinds lists the kinds of memory that the comm supports."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return any(kind.partition(":")[0] == "cuda" for kind in kinds.split(","))


def _library_says() -> bool:
    """MPIX_Query_cuda_support of Open MPI, MPIX_GPU_query_support of MPICH, where the loaded library has them."""
    library = ctypes.CDLL(MPI.__file__)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        return library.MPIX_GPU_query_support(0, ctypes.byref(flag)) == MPI.SUCCESS and bool(flag.value)
    return False
