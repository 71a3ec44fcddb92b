"""Arrays behind one small interface: NumPy's in host memory, CuPy's on a GPU.

A space is where an array lives: it wraps what the caller passed, makes scratch, copies, and knows how MPI gets at the bytes.
Everything else treats an array as a flat vector in C order, whatever its strides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.runtime.cuda import cuda_aware


class Host:
    """Arrays in host memory: NumPy's, and all that NumPy can wrap without a copy."""

    xp: Any = np
    reachable = True
    settle = None

    def identity(self, array: np.ndarray) -> tuple:
        """Return what tells apart two arrays as far as a plan goes: place, layout, and whether it may be written."""
        return address(array), array.shape, array.strides, array.dtype, array.flags.writeable

    def alias(self, array: np.ndarray) -> np.ndarray:
        """Return an array over the same memory that does not keep it alive: plans outlive the buffers that they were made for."""
        if array.size == 0:
            return np.empty(array.shape, array.dtype)
        low, high = bounds(array)
        memory = MPI.buffer.fromaddress(low, high - low)
        return np.ndarray(array.shape, array.dtype, memory, array.ctypes.data - low, array.strides)

    def overlap(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Tell whether two arrays share an element; where that is too hard to say, that they do."""
        try:
            return np.shares_memory(a, b, max_work=10_000)
        except np.exceptions.TooHardError:
            return True

    def scratch(self, nbytes: int) -> np.ndarray:
        """Make scratch where the arrays live."""
        return np.empty(nbytes, np.uint8)

    host_scratch = scratch

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy between arrays of this space."""
        np.copyto(target, source)

    def made(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Make an array where these live."""
        return np.empty(shape, dtype)

    def stream(self) -> Any:
        """Return what orders this thread's work on arrays, for on(); nothing does in host memory."""
        return None

    def on(self, stream: Any) -> Any:
        """Return a context in which another thread's work on arrays is ordered with the thread's that asked for the stream."""
        return nullcontext()


class Device:
    """Arrays on a GPU, of CuPy or of a module like it. Work goes to the caller's current stream."""

    def __init__(self, module: Any, index: int):
        self.xp, self.index = module, index
        self.reachable = cuda_aware()

    def identity(self, array: Any) -> tuple:
        """As for the host; device memory can always be written."""
        return array.data.ptr, array.shape, array.strides, array.dtype, self.index

    def alias(self, array: Any) -> Any:
        """As for the host."""
        if array.size == 0:
            return self.xp.empty(array.shape, array.dtype)
        low, high = bounds(array)
        memory = self.xp.cuda.UnownedMemory(low, high - low, None, self.index)
        pointer = self.xp.cuda.MemoryPointer(memory, array.data.ptr - low)
        return self.xp.ndarray(array.shape, array.dtype, pointer, array.strides)

    def overlap(self, a: Any, b: Any) -> bool:
        """As for the host, from the bounds alone."""
        (a_low, a_high), (b_low, b_high) = bounds(a), bounds(b)
        return a_low < b_high and b_low < a_high

    def scratch(self, nbytes: int) -> Any:
        """Make scratch on the device."""
        with self.here():
            return self.xp.empty(nbytes, self.xp.uint8)

    def host_scratch(self, nbytes: int) -> np.ndarray:
        """Make scratch in pinned host memory, so that copies to and from it run beside the exchange."""
        memory = self.xp.cuda.alloc_pinned_memory(max(1, nbytes))
        return np.frombuffer(memory, np.uint8, nbytes)

    def copy(self, target: Any, source: Any) -> None:
        """Start a copy on the current stream: in the device, or between it and pinned host memory."""
        runtime, stream = self.xp.cuda.runtime, self.xp.cuda.get_current_stream()
        if isinstance(source, np.ndarray):
            runtime.memcpyAsync(target.data.ptr, source.ctypes.data, target.nbytes, runtime.memcpyHostToDevice, stream.ptr)
        elif isinstance(target, np.ndarray):
            runtime.memcpyAsync(target.ctypes.data, source.data.ptr, source.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        else:
            self.xp.copyto(target, source)

    def pull(self, packed: np.ndarray, array: Any) -> None:
        """Copy an array, whatever its strides, into a packed one in host memory; wait for it."""
        array.get(out=packed)

    def push(self, array: Any, packed: np.ndarray) -> None:
        """Start the copy of a packed array in host memory into an array, whatever its strides."""
        array[...] = self.xp.asarray(packed)

    def made(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """As for the host."""
        with self.here():
            return self.xp.empty(shape, dtype)

    def here(self) -> Any:
        """Return a context in which the arrays' device is the current one."""
        return self.xp.cuda.Device(self.index)

    def stream(self) -> Any:
        """As for the host: this thread's current stream."""
        with self.here():
            return self.xp.cuda.get_current_stream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """As for the host: on their device, in work on a stream."""
        with self.here(), stream:
            yield

    def settle(self) -> None:
        """Wait for all that was started on the current stream."""
        self.xp.cuda.get_current_stream().synchronize()


Space = Host | Device

HOST = Host()

DEVICE_MODULES = {"cupy"}
"""Modules whose arrays live on a GPU; tests add a stand-in."""


@lru_cache(maxsize=64)
def _device(module: str, index: int) -> Device:
    return Device(sys.modules[module], index)


def wrap(buffer: object, argument: str) -> tuple[Any, Space]:
    """Return the array over a buffer that a caller passed, without a copy, and its space; TypeError if there is none."""
    if type(buffer) is np.ndarray:
        return buffer, HOST
    if buffer is MPI.IN_PLACE or buffer is MPI.BOTTOM:
        raise TypeError(f"{argument} is MPI.IN_PLACE or MPI.BOTTOM, and there is no other buffer")
    module = type(buffer).__module__.partition(".")[0]
    if module in DEVICE_MODULES and isinstance(buffer, sys.modules[module].ndarray):
        return buffer, _device(module, buffer.device.id)
    if isinstance(buffer, np.ma.MaskedArray):
        raise TypeError(f"{argument} is a masked array: pass its .data")
    if isinstance(buffer, np.ndarray):
        return buffer.view(np.ndarray), HOST
    try:
        return np.asarray(memoryview(buffer)), HOST
    except (TypeError, ValueError, BufferError):
        way = "; pass its .numpy()" if hasattr(buffer, "numpy") else ""
        raise TypeError(f"{argument} is of type {type(buffer).__name__}: not a NumPy or CuPy array, nor another buffer in memory"
                        f"{way}") from None


def address(array: np.ndarray) -> int:
    """Return where the first element of an array is."""
    try:
        return MPI.Get_address(array)         # in a fifth of the time that array.ctypes takes
    except (ValueError, BufferError):         # strided, or a dtype that the buffer protocol does not know
        return array.ctypes.data


def shares_elements(array: Any) -> bool:
    """Tell whether elements of an array may share memory, as in a sliding window; those of slices and transposes never do."""
    reach = array.itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(array.strides, array.shape) if length > 1):
        if stride < reach:
            return array.size > 0
        reach += stride * (length - 1)
    return False


class Vector:
    """An array as a flat vector in C order."""

    def __init__(self, array: Any):
        self.array = array
        self.flat = bool(array.flags.c_contiguous)
        self._line = array.reshape(-1) if self.flat else None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield views of the array that hold elements start to stop: one if it is flat, else boxes; with their place from start."""
        if self.flat:
            yield self._line[start:stop], 0, stop - start
            return
        at = 0
        for index, length in boxes(self.array.shape, start, stop):
            yield self.array[index], at, at + length
            at += length


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple, int]]:
    """Split a range of C-order positions into boxes: at most 2 ndim - 1 indices, each with its number of elements.

    >>> list(boxes((3, 4), 2, 9))
    [((0, slice(2, 4, None)), 2), ((slice(1, 2, None),), 4), ((2, slice(0, 1, None)), 1)]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((slice(start, stop),) if shape else (..., )), stop - start
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, first - 1, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (slice(first, last),), (last - first) * row
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[tuple, int]]:
    base = index * prod(shape[1:])
    for inner, length in boxes(shape[1:], start - base, stop - base):
        yield (index, *inner), length


def bounds(array: Any) -> tuple[int, int]:
    """Return the first address that an array uses and the one after the last."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides)]
    return address + sum(step for step in reach if step < 0), address + sum(step for step in reach if step > 0) + array.itemsize
