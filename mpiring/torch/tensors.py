"""Tensors as arrays and arrays as tensors, over the same memory: NumPy's for the CPU, CuPy's for a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

_FOREIGN = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2",
            torch.float8_e4m3fnuz: "float8_e4m3fnuz", torch.float8_e5m2fnuz: "float8_e5m2fnuz"}
"""PyTorch's dtypes that NumPy has from ml_dtypes."""

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
"""The integers, by their bytes, as which these go from one to the other."""

_TORCH = {name: dtype for dtype, name in _FOREIGN.items()}


def array_of(tensor: torch.Tensor, in_place: bool = False) -> Any:
    """Return a tensor's elements as an array of the same shape and strides, without a copy.

    in_place: the array is to be written to. Where not, a tensor that is only marked as conjugate or negative (x.conj()) is
    computed into a new one.

    Raises TypeError for what is no tensor, ValueError for one that has no such memory: sparse, quantized, of a dtype or device
    that nothing here knows.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is of type {type(tensor).__name__}, not a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"tensor is {'quantized' if tensor.is_quantized else 'of layout ' + str(tensor.layout)}, which is not "
                         "supported: pass a dense one")
    bare = _resolved(tensor.detach(), in_place)
    foreign = _FOREIGN.get(bare.dtype)
    if foreign is not None:
        bare = bare.view(_BITS[bare.itemsize][0])
    array = _bare_array(bare)
    return array if foreign is None else array.view(_dtype(foreign))


def tensor_of(array: Any) -> torch.Tensor:
    """Return an array's elements as a tensor of the same shape and strides, without a copy."""
    dtype = _TORCH.get(array.dtype.name)
    if dtype is not None:
        array = array.view(_BITS[array.dtype.itemsize][1])
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(dtype)


def stream_of(tensor: Any) -> AbstractContextManager:
    """Return a context in which work on arrays is ordered with PyTorch's on a tensor's device."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return nullcontext()
    device = tensor.device.index
    return _cupy().cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device)


def _resolved(tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Compute what is only marked as conjugate or negative."""
    if not tensor.is_conj() and not tensor.is_neg():
        return tensor
    if in_place:
        raise ValueError("tensor is a conjugate or negative view, which cannot be written to in place: pass x.resolve_conj()")
    return tensor.resolve_conj().resolve_neg()


def _bare_array(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "cuda":
        return _cupy().from_dlpack(tensor)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"tensor of dtype {tensor.dtype} on {tensor.device} is not supported: {error}") from None


@cache
def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(getattr(import_module("ml_dtypes"), name))
    except ImportError:
        raise ValueError(f"tensors of dtype {name} need ml_dtypes: pip install 'mpiring[torch]'") from None


@cache
def _cupy() -> Any:
    try:
        return import_module("cupy")
    except ImportError:
        raise ValueError("CUDA tensors need CuPy: pip install 'mpiring[cuda12]', or [cuda13]") from None
