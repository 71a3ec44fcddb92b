"""Floats of 16 bits or fewer: sums and products of whole vectors in float32, rounded once, and faster steps of two operands.

NumPy adds float16 at 0.3 GB/s a core and bfloat16 at 1, because it converts element by element; PyTorch's CPU kernels convert
float16 20 times as fast, and pack bfloat16 4 times as fast. So where PyTorch is installed it converts, and NumPy reduces, in
float32: the bits are the same with and without it.

PyTorch is imported when the first vector comes that gains by it, never before. Its kernels run on the calling thread alone, because
no piece is longer than what they do not share out among threads (32,768 elements): the other cores belong to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpiring.runtime.ops import Operation

PIECE = 32768
"""Elements that are converted and reduced at a time: the most that PyTorch does on one thread. Two copies fit in L2."""

_TORCH_NAMES = {"add": "add", "multiply": "mul"}

_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""The bits of infinity in the dtypes that PyTorch converts; those of NaN are above."""

_WORTH = {"float16": 4096, "bfloat16": 20480}
"""Elements from which PyTorch is used: for a step of two operands it needs 24 and 32 us then, NumPy 27 and 33."""

Task = tuple[Callable[..., Any], tuple]
Run = Callable[[], None]


def is_float(dtype: np.dtype) -> bool:
    """Tell whether a dtype is a real float: NumPy's, or one of ml_dtypes'."""
    return dtype.kind == "f" or (dtype.type.__module__ == "ml_dtypes" and "float" in dtype.name)


def is_narrow(dtype: np.dtype) -> bool:
    """Tell whether a dtype is a float of 16 bits or fewer, which sums want a wider one for."""
    return dtype.itemsize <= 2 and is_float(dtype)


def accumulator(operation: Operation, dtype: np.dtype, length: int) -> Accumulator | None:
    """Return what reduces vectors of up to `length` elements in float32; None where the dtype or the op needs nothing wider."""
    if not is_narrow(dtype) or operation.ufunc not in _TORCH_NAMES:
        return None
    return Accumulator(operation.ufunc, dtype, length, _backend(operation.ufunc, dtype, length))


class Accumulator:
    """Reduces vectors of a narrow float dtype in float32, in scratch of its own, so one of its functions may run at a time."""

    def __init__(self, ufunc: str, dtype: np.dtype, length: int, backend: _NumPy | _Torch):
        self.ufunc, self.backend = getattr(np, ufunc), backend
        piece = min(length, PIECE)
        self.total, self.wide, self.rounded = np.empty(piece, np.float32), np.empty(piece, np.float32), np.empty(piece, dtype)

    def bind(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], divide_by: int | None = None) -> Run:
        """Return the function that reduces `sources` in their order, divides, rounds once, to nearest even, and fills every target.

        All are flat and contiguous, of one length, and may be unaligned; a target may be one of the sources, but not overlap
        one in part. Every NaN of the result is the positive quiet one.
        """
        parts = [slice(start, start + PIECE) for start in range(0, sources[0].size, PIECE)]
        runs = [self._piece([array[part] for array in sources], [array[part] for array in targets], divide_by) for part in parts]
        return runs[0] if len(runs) == 1 else _sequence([(run, ()) for run in runs])

    def _piece(self, sources: list[np.ndarray], targets: list[np.ndarray], divide_by: int | None) -> Run:
        total, wide, rounded = (scratch[:sources[0].size] for scratch in (self.total, self.wide, self.rounded))
        backend = self.backend
        tasks = [backend.unpack(sources[0], total)]
        for source in sources[1:]:
            tasks += [backend.unpack(source, wide), (self.ufunc, (total, wide, total))]
        if divide_by is not None:
            tasks.append((np.true_divide, (total, np.float32(divide_by), total)))
        tasks.append(backend.pack(total, targets[0]))
        tasks += [(np.copyto, (target, targets[0])) for target in targets[1:]]
        whole = _sequence(tasks)
        if len(sources) != 2 or divide_by is not None:
            return whole
        return backend.pair(*sources, rounded, targets, whole)


def _sequence(tasks: list[Task]) -> Run:
    def run() -> None:
        for function, args in tasks:
            function(*args)

    return run


class _NumPy:
    """Converts by NumPy's and ml_dtypes' casts, but for float16 to float32, where arithmetic on the bits is 3 times as fast."""

    def __init__(self, dtype: np.dtype):
        self.float16 = dtype == np.float16      # in native byte order

    def unpack(self, source: np.ndarray, wide: np.ndarray) -> Task:
        """Return the task that makes float32 of a source."""
        if self.float16:
            return _unpack_float16, (source, wide)
        return np.copyto, (wide, source)

    def pack(self, total: np.ndarray, target: np.ndarray) -> Task:
        """Return the task that rounds the total into a target."""
        return _round, (total, target)

    def pair(self, left: np.ndarray, right: np.ndarray, rounded: np.ndarray, targets: list[np.ndarray], whole: Run) -> Run:
        """Return the function for two sources: nothing special here."""
        return whole


def _unpack_float16(source: np.ndarray, wide: np.ndarray) -> None:
    """Put sign, exponent and fraction in float32's places, then scale by what the exponents' biases differ (127 - 15).

    That is right for subnormal numbers as well, but neither for infinity nor for NaN.
    """
    if not _is_finite(source, _INFINITY["float16"]):
        np.copyto(wide, source)
        return
    bits = wide.view(np.int32)
    np.copyto(bits, source.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)       # the sign stays, its copies in the next three bits go
    np.multiply(wide, np.float32(2.0**112), out=wide)


def _is_finite(array: np.ndarray, infinity: int) -> bool:
    """Tell whether all numbers of 16 bits are finite: as unsigned integers the negative ones are on top, as signed the others."""
    lowest, highest = np.maximum.reduce(array.view(np.uint16)), np.maximum.reduce(array.view(np.int16))
    return bool(lowest < 0x8000 | infinity and highest < infinity)


def _round(total: np.ndarray, target: np.ndarray) -> None:
    """Round float32 to the target's dtype, with one NaN for all: processors and casts disagree about signs and payloads."""
    if np.isnan(np.maximum.reduce(total)):
        np.copyto(total, np.float32(np.nan), where=np.isnan(total))
    np.copyto(target, total, casting="unsafe")


class _Torch:
    """Converts by PyTorch's kernels, which share memory with the arrays."""

    def __init__(self, torch: Any, ufunc: str, dtype: np.dtype):
        self.ufunc = getattr(torch, _TORCH_NAMES[ufunc])
        self.from_numpy, self.dtype = torch.from_numpy, getattr(torch, dtype.name)
        self.infinity = _INFINITY[dtype.name]

    def tensor(self, array: np.ndarray) -> Any:
        """Return a tensor over a narrow array's memory."""
        bits = array.view(np.int16)
        return self.from_numpy(bits if bits.flags.writeable else np.asarray(_Writable(bits))).view(self.dtype)

    def tensors(self, array: np.ndarray) -> Sequence[Any]:
        """Return the pieces of an array as tensors."""
        tensor = self.tensor(array)
        return tensor.split(PIECE) if array.size > PIECE else (tensor,)

    def unpack(self, source: np.ndarray, wide: np.ndarray) -> Task:
        """Return the task that makes float32 of a source."""
        return self.from_numpy(wide).copy_, (self.tensor(source),)

    def pack(self, total: np.ndarray, target: np.ndarray) -> Task:
        """Return the task that rounds the total into a target: by NumPy where the result is not finite."""
        copy, source, infinity = self.tensor(target).copy_, self.from_numpy(total), self.infinity

        def pack() -> None:
            copy(source)
            if not _is_finite(target, infinity):
                _round(total, target)

        return pack, ()

    def pair(self, left: np.ndarray, right: np.ndarray, rounded: np.ndarray, targets: list[np.ndarray], whole: Run) -> Run:
        """Return the function for two sources, in one pass: PyTorch's kernel too computes in float32 and rounds once."""
        reduce = self.reducer(self.tensor(left), self.tensor(right), rounded)

        def run() -> None:
            if reduce():
                for target in targets:
                    np.copyto(target, rounded)
            else:
                whole()

        return run

    def reducer(self, left: Any, right: Any, rounded: np.ndarray) -> Callable[[], bool]:
        """Return what reduces two tensors into `rounded` and tells whether the result is finite; else it may be wrong."""
        ufunc, out, infinity = self.ufunc, self.tensor(rounded), self.infinity

        def reduce() -> bool:
            ufunc(left, right, out=out)
            return _is_finite(rounded, infinity)

        return reduce


class _Writable:
    """A read-only array's memory as an array that may be written to: PyTorch warns of any other, though it only reads it."""

    def __init__(self, array: np.ndarray):
        self.array = array      # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def combine(operation: Operation, dtype: np.dtype) -> Callable[[Any, Any, Any], Any]:
    """Return the function (left, right, out) of NumPy arrays that does what the op's ufunc does: same bits, same warnings.

    PyTorch computes where it is installed, the arrays are contiguous and long enough, and the result is finite.
    """
    ufunc = getattr(np, operation.ufunc)
    if not _fits_torch(operation.ufunc, dtype):
        return ufunc
    rounded = np.empty(PIECE, dtype)

    def combine(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> Any:
        flat = left.flags.c_contiguous and right.flags.c_contiguous and out.flags.c_contiguous
        backend = _torch_backend(operation.ufunc, dtype) if flat and out.size >= _WORTH[dtype.name] else None
        if backend is None:
            return ufunc(left, right, out)
        _combine(backend, ufunc, rounded, *(array.reshape(-1) for array in (left, right, out)))
        return out

    return combine


def _combine(backend: _Torch, ufunc: np.ufunc, rounded: np.ndarray, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Reduce piece by piece into scratch, so that where the result is not finite the operands are still there for NumPy."""
    start = 0
    for first, second in zip(backend.tensors(left), backend.tensors(right)):
        part = slice(start, start + PIECE)
        result = rounded[:out.size - start]
        if backend.reducer(first, second, result)():
            out[part] = result
        else:
            ufunc(left[part], right[part], out[part])
        start += PIECE


def _backend(ufunc: str, dtype: np.dtype, length: int) -> _NumPy | _Torch:
    """Return what converts vectors of `length` elements."""
    torch = _torch_backend(ufunc, dtype) if _fits_torch(ufunc, dtype) and length >= _WORTH[dtype.name] else None
    return torch or _NumPy(dtype)


def _fits_torch(ufunc: str, dtype: np.dtype) -> bool:
    """Tell whether PyTorch, where it is installed, can be of use."""
    return ufunc in _TORCH_NAMES and dtype.isnative and dtype.name in _INFINITY


@cache
def _torch_backend(ufunc: str, dtype: np.dtype) -> _Torch | None:
    """Return what converts by PyTorch, importing it; None where it is missing or cannot be loaded."""
    try:
        return _Torch(import_module("torch"), ufunc, dtype)
    except (ImportError, OSError):
        return None
