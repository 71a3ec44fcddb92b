"""A stand-in for CuPy on a machine without a GPU: as much of its interface as mpiring uses, and made to fail where order matters.

Device memory is host memory that NumPy is kept from. Every operation is queued on the current stream and runs when the stream is
synchronised, never before. As soon as it is queued, what it will write is poisoned: who reads the result too early, in device
memory or in pinned host memory, reads POISON. What it reads is read when it runs: who overwrites a source too early spoils the
result. MPI can read device memory only while REACHABLE is true: the stand-in for an MPI library that is CUDA-aware.

LOG lists what happened, in order: ("allocate", nbytes), ("copy", kind), ("ufunc", name), ("synchronize",).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

POISON = 0xA5
REACHABLE = False
LOG: list[tuple] = []

uint8 = np.uint8

_blocks: dict[int, tuple[int, str]] = {}     # address: nbytes, and whether it is "device" or "pinned"


class _Entered(threading.local):
    """The devices and streams that a thread has entered: each has its own, as in CuPy."""

    def __init__(self) -> None:
        self.devices: list[Device] = []
        self.streams: list[Stream] = []


_entered = _Entered()


def _allocate(nbytes: int, kind: str) -> np.ndarray:
    """Make memory that is known by its address while it lives; what it holds at first is poison."""
    LOG.append(("allocate", nbytes))
    memory = np.full(max(1, nbytes), POISON, np.uint8)
    _blocks[memory.ctypes.data] = memory.nbytes, kind
    weakref.finalize(memory, _blocks.pop, memory.ctypes.data).atexit = False
    return memory


def _require(kind: str, address: int, nbytes: int) -> None:
    if not any(low <= address and address + nbytes <= low + length and kind == found for low, (length, found) in _blocks.items()):
        raise ValueError(f"{nbytes} bytes at {address:#x} are not in {kind} memory that is in use")


def _bounds(address: int, shape: tuple, strides: tuple, itemsize: int) -> tuple[int, int]:
    reach = [(length - 1) * stride for length, stride in zip(shape, strides)]
    return address + sum(min(step, 0) for step in reach), address + sum(max(step, 0) for step in reach) + itemsize


def _view(address: int, shape: tuple, dtype: Any, strides: tuple | None = None) -> np.ndarray:
    """Return a NumPy array over memory at an address."""
    dtype = np.dtype(dtype)
    if prod(shape) == 0:
        return np.empty(shape, dtype)
    packed = address, address + prod(shape) * dtype.itemsize
    low, high = packed if strides is None else _bounds(address, shape, strides, dtype.itemsize)
    return np.ndarray(shape, dtype, (ctypes.c_char * (high - low)).from_address(low), address - low, strides)


@dataclass
class Work:
    """An operation that has not run yet. `reads` and `writes` are ranges of addresses."""

    name: str
    run: Callable[[], Any]
    target: np.ndarray
    saved: np.ndarray
    reads: list[tuple[int, int]]
    writes: tuple[int, int]


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


class Stream:
    """A queue of work."""

    def __init__(self, ptr: int | None = None, non_blocking: bool = False):
        self.ptr = id(self) if ptr is None else ptr
        self.queue: list[Work] = []
        _streams[self.ptr] = self

    def __enter__(self) -> Stream:
        _entered.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.streams.pop()

    def synchronize(self) -> None:
        """Run what is queued, on memory as it is now but for the poison."""
        LOG.append(("synchronize",))
        for work in reversed(self.queue):
            work.target[...] = work.saved
        with np.errstate(all="ignore"):
            for work in self.queue:
                work.run()
        self.queue.clear()


_default_stream = Stream(0)


def get_current_stream() -> Stream:
    """Return the stream that this thread has entered last."""
    return _entered.streams[-1] if _entered.streams else _default_stream


def _queue(log: tuple, run: Callable[[], Any], target: np.ndarray, sources: list[np.ndarray], stream: Stream | None = None) -> None:
    LOG.append(log)
    if target.size == 0:
        return
    raw = _view(target.ctypes.data, (*target.shape, target.itemsize), np.uint8, (*target.strides, 1))
    work = Work(log[1], run, raw, raw.copy(), [_span(source) for source in sources if source.size], _span(target))
    raw[...] = POISON
    (stream or get_current_stream()).queue.append(work)


def _span(view: np.ndarray) -> tuple[int, int]:
    return _bounds(view.ctypes.data, view.shape, view.strides, view.itemsize)


def pending() -> list[Work]:
    """List the work that has been queued and has not run, on all streams."""
    return [work for stream in _streams.values() for work in stream.queue]


def reset() -> None:
    """Drop all that is queued, and the log."""
    for stream in _streams.values():
        stream.queue.clear()
    LOG.clear()


class Device:
    """A device by its number; there are two. As a context: the one on which memory is allocated."""

    def __init__(self, index: int = 0):
        if index not in (0, 1):
            raise ValueError(f"no device {index}")
        self.id = index

    def __enter__(self) -> Device:
        _entered.devices.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.devices.pop()


class Memory:
    """Device memory, freed with this object."""

    def __init__(self, nbytes: int):
        self.device_id = _entered.devices[-1].id if _entered.devices else 0
        self.memory = _allocate(nbytes, "device") if nbytes else None
        self.ptr = self.memory.ctypes.data if nbytes else 0


class UnownedMemory:
    """Device memory that something else keeps."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1):
        _require("device", ptr, size)
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """A place in device memory."""

    def __init__(self, mem: Memory | UnownedMemory, offset: int):
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device(self) -> Device:
        return Device(self.mem.device_id)


class ndarray:
    """An array in device memory. NumPy cannot read it, neither as a buffer nor as a sequence."""

    __array_ufunc__ = None
    __iter__ = None

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: tuple | None = None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.data = memptr or MemoryPointer(Memory(prod(shape) * self.dtype.itemsize), 0)
        self._host = _view(self.data.ptr, shape, self.dtype, strides)

    @property
    def shape(self) -> tuple:
        return self._host.shape

    @property
    def strides(self) -> tuple:
        return self._host.strides

    @property
    def ndim(self) -> int:
        return self._host.ndim

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def flags(self) -> Any:
        return SimpleNamespace(c_contiguous=self._host.flags.c_contiguous)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def T(self) -> ndarray:
        return self._over(self._host.T)

    def _over(self, view: np.ndarray) -> ndarray:
        """Return the array over a part of this one's memory."""
        offset = view.ctypes.data - self.data.mem.ptr if view.size else 0
        return ndarray(view.shape, view.dtype, MemoryPointer(self.data.mem, offset), view.strides)

    def reshape(self, *shape: Any) -> ndarray:
        view = self._host.reshape(*shape)
        if self.size and not np.shares_memory(view, self._host):
            raise NotImplementedError("this reshape would copy")
        return self._over(view)

    def view(self, dtype: Any) -> ndarray:
        return self._over(self._host.view(dtype))

    def __getitem__(self, index: Any) -> ndarray:
        return self._over(np.asanyarray(self._host[index]))

    def __setitem__(self, index: Any, value: ndarray) -> None:
        copyto(self[index], value)

    def get(self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None) -> np.ndarray:
        """Copy to host memory and wait for it; `out` must be contiguous, and of the same shape and dtype."""
        out = np.empty(self.shape, self.dtype) if out is None else out
        if (out.shape, out.dtype) != (self.shape, self.dtype):
            raise ValueError(f"out is {out.dtype} of shape {out.shape}, not {self.dtype} of shape {self.shape}")
        if not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError("out is not contiguous")
        _queue(("copy", "device to host"), lambda: np.copyto(out, self._host), out, [self._host], stream)
        (stream or get_current_stream()).synchronize()
        return out

    @property
    def __cuda_array_interface__(self) -> dict:
        if not REACHABLE:
            raise AttributeError("this MPI library cannot read device memory")
        return {"shape": self.shape, "typestr": self.dtype.str, "strides": None if self.flags.c_contiguous else self.strides,
                "data": (self.data.ptr if self.size else 0, False), "version": 3}

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed; use .get()")


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Make an array on the current device, holding poison."""
    return ndarray(shape, dtype)


def asarray(array: np.ndarray) -> ndarray:
    """Queue the copy of a NumPy array to the current device."""
    made = ndarray(array.shape, array.dtype)
    _queue(("copy", "host to device"), lambda: np.copyto(made._host, array), made._host, [array])
    return made


def peek(array: ndarray) -> np.ndarray:
    """Copy what the memory of an array holds now, without waiting for anything."""
    return array._host.copy()


def _device_array(array: Any) -> np.ndarray:
    if not isinstance(array, ndarray):
        raise TypeError(f"a {type(array).__name__} is not in device memory")
    return array._host


def copyto(target: ndarray, source: ndarray) -> None:
    """Queue a copy in device memory."""
    to, of = _device_array(target), _device_array(source)
    _queue(("copy", "device to device"), lambda: np.copyto(to, of), to, [of])


class ufunc:
    """A NumPy ufunc on device arrays and scalars, with an output: operands that overlap it, but are not it, are copied first."""

    def __init__(self, function: np.ufunc):
        self.function = function

    def __call__(self, *args: Any, out: ndarray | None = None, casting: str = "same_kind") -> ndarray:
        *operands, out = args if out is None else (*args, out)
        if len(operands) != self.function.nin:
            raise TypeError(f"{self.function.__name__} with {len(args)} arguments")
        target = _device_array(out)
        sources = [operand if isinstance(operand, int | float | np.generic) else _device_array(operand) for operand in operands]
        for operand, source in zip(operands, sources):
            if operand is not out and isinstance(operand, ndarray) and np.may_share_memory(source, target):
                LOG.append(("allocate", source.nbytes))
        arrays = [source for source in sources if isinstance(source, np.ndarray)]
        _queue(("ufunc", self.function.__name__), lambda: self.function(*sources, out=target, casting=casting), target, arrays)
        return out


add, multiply, true_divide = ufunc(np.add), ufunc(np.multiply), ufunc(np.true_divide)
maximum, minimum = ufunc(np.maximum), ufunc(np.minimum)
logical_and, logical_or, logical_xor = ufunc(np.logical_and), ufunc(np.logical_or), ufunc(np.logical_xor)
bitwise_and, bitwise_or, bitwise_xor = ufunc(np.bitwise_and), ufunc(np.bitwise_or), ufunc(np.bitwise_xor)

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def _memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    """Queue a copy between device memory and pinned host memory; with pageable memory it would not be asynchronous."""
    kinds = ("device", "pinned") if kind == HOST_TO_DEVICE else ("pinned", "device")
    for memory, address in zip(kinds, (target, source)):
        _require(memory, address, nbytes)
    to, of = _view(target, (nbytes,), np.uint8), _view(source, (nbytes,), np.uint8)
    name = "host to device" if kind == HOST_TO_DEVICE else "device to host"
    _queue(("copy", name), lambda: np.copyto(to, of), to, [of], _streams[stream])


def alloc_pinned_memory(nbytes: int) -> memoryview:
    """Make pinned host memory; what is returned is a buffer."""
    return memoryview(_allocate(nbytes, "pinned"))


cuda = SimpleNamespace(
    Device=Device, Stream=Stream, get_current_stream=get_current_stream, MemoryPointer=MemoryPointer, UnownedMemory=UnownedMemory,
    alloc_pinned_memory=alloc_pinned_memory,
    runtime=SimpleNamespace(memcpyAsync=_memcpy_async, memcpyHostToDevice=HOST_TO_DEVICE, memcpyDeviceToHost=DEVICE_TO_HOST))
