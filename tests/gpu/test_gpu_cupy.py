"""What of CuPy can be seen without a GPU: that the names exist which mpiring uses, and how its arrays lie in memory."""

import ctypes
import re
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.runtime import arrays, ops

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

NAMES = ("cuda.Stream.null.synchronize", "cuda.Stream.null.ptr", "cuda.runtime.memcpyAsync", "cuda.runtime.memcpyHostToDevice",
         "cuda.runtime.memcpyDeviceToHost", "cuda.MemoryPointer.ptr", "cuda.MemoryPointer.device",
         *(f"ndarray.{name}" for name in ("data", "shape", "strides", "dtype", "size", "nbytes", "itemsize", "flags", "device",
                                          "view", "reshape", "get", "__getitem__", "__setitem__")))
UFUNCS = {operation.ufunc for _, operation in ops._TABLE}
LAYOUTS = (((), ()), ((10,), (4,)), ((10,), (-8,)), ((4, 3), (12, 4)), ((4, 3), (24, 8)), ((3, 4), (4, 12)),
           ((2, 3, 5), (60, -20, 4)))


def test_the_names_exist():
    sources = [Path(module.__file__).read_text() for module in (arrays, ops)]
    used = {name for source in sources for name in re.findall(r"\bxp\.([\w.]+)", source)}
    assert {"empty", "copyto", "cuda.UnownedMemory", "true_divide"} <= used
    for name in sorted(used | set(NAMES) | UFUNCS):
        reduce(getattr, name.split("."), cupy)


def both(shape, strides):
    """Make the array in a layout twice, over the same host memory: CuPy does not look at it. The first element is in its middle."""
    memory = np.zeros(1000, np.uint8)
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0), 400)
    return cupy.ndarray(shape, np.float32, pointer, strides), np.ndarray(shape, np.float32, memory, 400, strides)


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_arrays_lie_as_numpys_do(shape, strides):
    array, host = both(shape, strides)
    device = arrays.Device(cupy, 0)
    assert arrays.bounds(array) == arrays.bounds(host)
    assert device.identity(array)[:4] == (host.ctypes.data, shape, strides, host.dtype)
    assert device.identity(device.alias(array)) == device.identity(array)
    assert device.overlap(array, array)
    assert arrays.wrap(array, "sendbuf")[0] is array
    assert array.flags.c_contiguous == host.flags.c_contiguous


@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_pieces_lie_as_numpys_do(shape, strides):
    array, host = both(shape, strides)
    vectors = arrays.Vector(array), arrays.Vector(host)
    for start in range(host.size):
        for stop in range(start + 1, host.size + 1):
            for (mine, *span), (its, *its_span) in zip(*(vector.pieces(start, stop) for vector in vectors), strict=True):
                assert (mine.data.ptr, mine.shape, mine.strides, span) == (its.ctypes.data, its.shape, its.strides, its_span)
                if vectors[0].flat:
                    assert (mine.view("u1").nbytes, mine.view("u1").data.ptr) == (its.nbytes, its.ctypes.data)


def test_scratch_is_cut_and_retyped():
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(1 << 20, 64, None, 0), 0)
    scratch = cupy.ndarray((64,), np.uint8, memory)
    for dtype in ("?", "f2", "f4", "i8", "c16"):
        for count in (0, 1, 3):
            assert scratch[:count * np.dtype(dtype).itemsize].view(np.dtype(dtype)).shape == (count,)


def test_pinned_memory_is_a_buffer():
    memory = (ctypes.c_char * 64)()
    pointer = cupy.cuda.PinnedMemoryPointer(SimpleNamespace(ptr=ctypes.addressof(memory), size=64), 0)
    array = np.frombuffer(pointer, np.uint8, 40)
    array[:] = 7
    assert bytes(memory) == b"\x07" * 40 + b"\0" * 24
    assert array.flags.writeable


def test_ufuncs_take_what_is_asked_of_them():
    for name in ("logical_and", "logical_or", "logical_xor"):
        assert all(kind in "".join(getattr(cupy, name).types) for kind in "?qQ"), name
    assert {"qq->d", "ff->f", "dd->d", "FF->F", "DD->D", "ee->e"} <= set(cupy.true_divide.types)
    for name in UFUNCS - {"logical_and", "logical_or", "logical_xor"}:
        assert {"??->?", "bb->b", "QQ->Q"} <= set(getattr(cupy, name).types), name
