"""Wrong use with GPU arrays, and what is asked of the environment."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.runtime import cuda

import standin

RANK = MPI.COMM_WORLD.rank


def test_a_user_op_is_refused(gpu):
    op = MPI.Op.Create(lambda a, b, datatype: None, commute=True)
    try:
        for algorithm in ("ring", "tree", "native", "auto"):
            with pytest.raises(TypeError, match=rf"allreduce on rank {RANK}: op is made with MPI.Op.Create: it is for host memory"):
                mpiring.allreduce(gpu.xp.empty(10), op=op, comm=gpu.comms[64], algorithm=algorithm)
    finally:
        op.Free()


def test_shared_is_for_host_memory(gpu):
    with pytest.raises(ValueError, match="algorithm 'shared' is for arrays in host memory"):
        mpiring.allreduce(gpu.xp.empty(10), comm=gpu.comms[64], algorithm="shared")


def test_host_and_device_do_not_mix(gpu):
    for buffers in ((np.empty(10), gpu.xp.empty(10)), (gpu.xp.empty(10), np.empty(10))):
        with pytest.raises(ValueError, match="not in the same memory"):
            mpiring.allreduce(*buffers, comm=gpu.comms[64])


def test_two_devices_do_not_mix(stand):
    with standin.cuda.Device(1):
        other = standin.empty(10)
    assert other.device.id == 1
    with pytest.raises(ValueError, match="or they are on two"):
        mpiring.allreduce(standin.empty(10), other, comm=stand.comms[64])


def test_overlap_is_refused(gpu):
    array = gpu.xp.empty(10)
    for one, other in ((array[:6], array[4:]), (array[:6], array[5::-1]), (array[::2], array[1::2])):     # bounds decide
        with pytest.raises(ValueError, match="overlap"):
            mpiring.allreduce(one[:5], other[:5], comm=gpu.comms[64])
    assert mpiring.allreduce(array[:5], array[5:], comm=gpu.comms[64]).shape == (5,)


def test_the_same_array_twice_is_in_place(gpu):
    array = gpu.xp.asarray(np.ones(10))
    assert mpiring.allreduce(array, array[:], comm=gpu.comms[64]).shape == (10,)
    assert (gpu.now(array) == MPI.COMM_WORLD.size).all()


def test_an_object_of_the_module_that_is_no_array_is_refused(gpu):
    with pytest.raises(TypeError, match="sendbuf is of type MemoryPointer"):
        mpiring.allreduce(gpu.xp.empty(10).data, comm=gpu.comms[64])


@pytest.fixture
def asked(monkeypatch):
    """Ask anew, with a value of MPIRING_CUDA_AWARE."""

    def ask(value):
        monkeypatch.setenv("MPIRING_CUDA_AWARE", value)
        cuda.cuda_aware.cache_clear()
        return cuda.cuda_aware()

    yield ask
    cuda.cuda_aware.cache_clear()


def test_the_environment_decides(asked):
    assert asked("1") is True
    assert asked("0") is False
    for value in ("2", "yes", " "):
        with pytest.raises(ValueError, match=f"MPIRING_CUDA_AWARE is {value!r}, not 0 or 1"):
            asked(value)


def test_else_the_library_is_asked(asked):
    assert asked("") in (True, False)
