"""The stand-in itself: what it lets through is what a GPU would."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

import standin

THOUSAND = np.arange(1000, dtype=np.float32)


@pytest.fixture(autouse=True)
def fresh():
    standin.reset()
    yield
    standin.reset()


def is_poison(host):
    return (np.frombuffer(host.tobytes(), np.uint8) == standin.POISON).all()


def ready(host):
    array = standin.asarray(host)
    standin.get_current_stream().synchronize()
    return array


def test_results_are_there_after_a_wait_only():
    array, out = standin.asarray(THOUSAND), standin.empty(1000, np.float32)
    standin.add(array, array, out)
    assert is_poison(standin.peek(array)) and is_poison(standin.peek(out))
    standin.get_current_stream().synchronize()
    assert (standin.peek(out) == 2 * THOUSAND).all()
    assert [entry[0] for entry in standin.LOG] == ["allocate", "copy", "allocate", "ufunc", "synchronize"]


def test_work_in_place_poisons_and_still_reads_what_was_there():
    array = ready(THOUSAND)
    standin.add(array, array, array)
    standin.true_divide(array, 4, array, casting="unsafe")
    assert is_poison(standin.peek(array))
    standin.get_current_stream().synchronize()
    assert (standin.peek(array) == THOUSAND / 2).all()


def test_only_the_elements_written_are_poisoned():
    array = ready(THOUSAND)
    standin.copyto(array[::2], ready(THOUSAND)[:500])
    assert is_poison(standin.peek(array[::2]))
    assert (standin.peek(array[1::2]) == THOUSAND[1::2]).all()


def test_a_source_that_is_overwritten_too_early_spoils_the_result():
    array, pinned = standin.empty(1000, np.float32), np.frombuffer(standin.alloc_pinned_memory(4000), np.float32)
    pinned[:] = THOUSAND
    standin.cuda.runtime.memcpyAsync(array.data.ptr, pinned.ctypes.data, 4000, standin.HOST_TO_DEVICE, 0)
    pinned[:10] = 0
    standin.get_current_stream().synchronize()
    assert (standin.peek(array)[:10] == 0).all() and (standin.peek(array)[10:] == THOUSAND[10:]).all()


def test_a_stream_waits_for_its_own_work_only():
    stream = standin.Stream()
    with stream:
        array = standin.asarray(THOUSAND)
    standin.get_current_stream().synchronize()
    assert is_poison(standin.peek(array)) and len(standin.pending()) == 1
    stream.synchronize()
    assert (standin.peek(array) == THOUSAND).all() and not standin.pending()


def test_each_thread_has_a_stream_and_a_device_of_its_own():
    stream, seen = standin.Stream(), []
    with stream, standin.cuda.Device(1):
        thread = threading.Thread(target=lambda: seen.extend((standin.get_current_stream(), standin.empty(1).device.id)))
        thread.start()
        thread.join()
        assert standin.get_current_stream() is stream and standin.empty(1).device.id == 1
    assert seen[0] is not stream and seen[1] == 0


def test_get_waits():
    assert (standin.asarray(THOUSAND).get() == THOUSAND).all()
    out = np.empty((2, 2, 3), np.float32)
    assert standin.asarray(THOUSAND[:12].reshape(3, 2, 2)).T.get(out=out) is out
    assert (out == THOUSAND[:12].reshape(3, 2, 2).T).all()


def test_numpy_cannot_read_device_memory():
    array = ready(THOUSAND)
    copies = (lambda array: np.add(array, 1), lambda array: np.copyto(THOUSAND.copy(), array))
    for read in (np.asarray, memoryview, np.sum, list, *copies):
        with pytest.raises((TypeError, AttributeError)):
            read(array)


def test_mpi_reads_device_memory_only_if_it_is_said_to(monkeypatch):
    array, other = ready(THOUSAND), ready(THOUSAND * 0)
    with pytest.raises(TypeError):
        MPI.COMM_SELF.Sendrecv(array, 0, 0, other, 0, 0)
    monkeypatch.setattr(standin, "REACHABLE", True)
    MPI.COMM_SELF.Sendrecv(array, 0, 0, other, 0, 0)
    assert (standin.peek(other) == THOUSAND).all()


def test_memory_is_told_apart():
    array, pageable = ready(THOUSAND), THOUSAND.copy()
    with pytest.raises(ValueError, match="not in pinned memory"):
        standin.cuda.runtime.memcpyAsync(array.data.ptr, pageable.ctypes.data, 4000, standin.HOST_TO_DEVICE, 0)
    with pytest.raises(ValueError, match="not in device memory"):
        standin.cuda.UnownedMemory(pageable.ctypes.data, 4000, None, 0)
    address = array.data.ptr
    del array
    with pytest.raises(ValueError, match="not in device memory that is in use"):
        standin.cuda.UnownedMemory(address, 4000, None, 0)
    with pytest.raises(TypeError):
        standin.add(THOUSAND, THOUSAND, standin.empty(1000, np.float32))
