"""What the GPU tests share: arrays of the stand-in and of CuPy behind one face, staged or read by MPI."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from mpi4py import MPI

from mpiring.runtime import arrays
from mpiring.runtime.channel import channel_of
from mpiring.runtime.cuda import cuda_aware

sys.path.insert(0, str(Path(__file__).parents[1]))

import standin
from spmd import pytest_configure, pytest_pyfunc_call, pytest_report_header

__all__ = ["pytest_configure", "pytest_pyfunc_call", "pytest_report_header"]

arrays.DEVICE_MODULES.add("standin")

SEGMENTS = (64, 256, 4096)


@dataclass(frozen=True)
class Gpu:
    """An array module whose arrays pass through host memory (staged), or are read by MPI; and a comm for each segment size."""

    xp: ModuleType
    reachable: bool
    comms: dict[int, MPI.Comm]

    @property
    def device(self) -> arrays.Device:
        return arrays._device(self.xp.__name__, 0)

    def now(self, array) -> np.ndarray:
        """Return what an array holds: with the stand-in as it is now, without waiting for work that is under way."""
        return standin.peek(array) if self.xp is standin else array.get()


def _comm(segment: int) -> MPI.Comm:
    """Return a duplicate whose channel is made already, with this size of a segment."""
    comm = MPI.COMM_WORLD.Dup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIRING_SEGMENT", str(segment))
        channel_of(comm)
    return comm


@pytest.fixture(scope="session")
def comms():
    """Keep the comms, made when first needed: a plan is for one module and mode, so each has its own."""
    made: dict[tuple[str, bool], dict[int, MPI.Comm]] = {}
    yield made
    for by_segment in made.values():
        for comm in by_segment.values():
            comm.Free()


def _cupy() -> ModuleType:
    """Return CuPy; skip where it is not installed or finds no GPU."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        pytest.skip("CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("CuPy finds no GPU")
    return cupy


def _gpu(name: str, reachable: bool, comms: dict, patch: pytest.MonkeyPatch) -> Gpu:
    xp = standin if name == "standin" else _cupy()
    if name == "cupy" and reachable and not cuda_aware():
        pytest.skip("this MPI library does not read GPU memory")
    if (name, reachable) not in comms:
        comms[name, reachable] = {segment: _comm(segment) for segment in SEGMENTS}
    gpu = Gpu(xp, reachable, comms[name, reachable])
    patch.setattr(gpu.device, "reachable", reachable)
    patch.setattr(standin, "REACHABLE", reachable)
    standin.reset()
    return gpu


@pytest.fixture(params=[False, True], ids=["staged", "aware"])
def stand(request, comms, monkeypatch):
    """Give the stand-in."""
    yield _gpu("standin", request.param, comms, monkeypatch)
    standin.reset()


@pytest.fixture(params=[(name, reachable) for name in ("standin", "cupy") for reachable in (False, True)],
                ids=["standin-staged", "standin-aware", "cupy-staged", "cupy-aware"])
def gpu(request, comms, monkeypatch):
    """Give each array module in each mode."""
    yield _gpu(*request.param, comms, monkeypatch)
    standin.reset()
