"""What gradients travel as: as they are, as 16-bit floats, or as a class of the user's has it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Compressor:
    """What DistributedOptimizer and allreduce take as `compression`: a class with these two functions, or an object."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is to be reduced in a tensor's place, of one shape and dtype on all ranks, and what decompress needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that a reduced one stands for."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class CastCompressor(Compressor):
    """Makes floats of 32 and 64 bits narrower; all else it leaves as it is."""

    dtype: torch.dtype

    @classmethod
    def narrower(cls, dtype: torch.dtype) -> bool:
        """Tell whether tensors of a dtype are cast."""
        return dtype.is_floating_point and dtype.itemsize > cls.dtype.itemsize

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the narrow tensor, and the dtype that it had."""
        return tensor.to(cls.dtype) if cls.narrower(tensor.dtype) else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)

    @classmethod
    def pack(cls, tensor: torch.Tensor, narrow: torch.Tensor) -> None:
        """Compress into memory that is there."""
        narrow.copy_(tensor)


class FP16Compressor(CastCompressor):
    """Sends floats as float16: 11 bits of precision, up to 65504."""

    dtype = torch.float16


class BF16Compressor(CastCompressor):
    """Sends floats as bfloat16: 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


class ErrorFeedback(Compressor):
    """Adds to each gradient what its compression lost the last time, so that rounding errors do not add up over the steps.

    What was lost is remembered for each tensor object, as long as it lives; a DistributedOptimizer's are the same in every step.
    What is not finite, as when float16 overflows, is forgotten. (Seide et al., 1-bit stochastic gradient descent, 2014.)
    """

    def __init__(self, compressor: Any):
        """compressor: a Compressor class or object, such as Compression.bf16."""
        checked(compressor, "compressor")
        self.compressor = compressor
        self._lost: Any = WeakTensorKeyDictionary()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Compress the tensor and what was lost before."""
        lost = self._lost.get(tensor)
        whole = tensor if lost is None else tensor + lost
        small, ctx = self.compressor.compress(whole)
        if small is not whole:
            with torch.no_grad():
                self._lost[tensor] = _finite(whole - self.compressor.decompress(small, ctx))
        return small, ctx

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that a reduced one stands for."""
        return self.compressor.decompress(tensor, ctx)

    def pack(self, tensor: torch.Tensor, narrow: torch.Tensor) -> None:
        """Compress into memory that is there; `tensor` then is what was compressed."""
        lost = self._lost.get(tensor)
        if lost is None:
            lost = self._lost[tensor] = torch.zeros_like(tensor)
        tensor.add_(lost)
        self.compressor.pack(tensor, narrow)
        _finite(lost.copy_(tensor).sub_(narrow))


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num_(0, 0, 0)


def wire(compression: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a compression that casts, or does nothing, sends a tensor."""
    return compression.compress(torch.empty(0, dtype=dtype))[0].dtype


def casts(compression: Any) -> bool:
    """Tell whether a compression works element by element into a narrower dtype, so that whole buckets can go through it."""
    inner = compression.compressor if isinstance(compression, ErrorFeedback) else compression
    return isinstance(inner, type) and issubclass(inner, CastCompressor)


def checked(compression: Any, argument: str) -> Any:
    """Return a compression; TypeError for what cannot be one."""
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise TypeError(f"{argument} {compression!r} has no functions compress and decompress: pass hvd.Compression.none, fp16, "
                        "bf16 or a Compressor class")
    return compression


class Compression:
    """The compressions there are; error_feedback(fp16) or error_feedback(bf16) wraps another one."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    error_feedback = ErrorFeedback
