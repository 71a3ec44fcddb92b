"""Batch normalization over the batch of all ranks, as if one process had it all."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from mpiring.torch.eager import eager
from mpiring.torch.exceptions import translated
from mpiring.torch.process_sets import ProcessSet, engine, global_process_set, within
from mpiring.torch.tensors import array_of

_native_backward = torch.ops.aten.native_batch_norm_backward


class SyncBatchNorm(_BatchNorm):
    """Normalizes each channel by mean and variance over the batches of all ranks of a process set; see torch.nn.BatchNorm2d.

    For inputs of 2 dimensions or more, on any device, which may be longer on one rank than on another, or empty. A rank that has
    joined counts for nothing. In evaluation, and with one rank, it is PyTorch's own. The gradients of weight and bias are those of
    a rank's own batch, for a DistributedOptimizer to reduce with the others.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_set: ProcessSet = global_process_set):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @eager
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input normalized. In training all ranks of the process set must call this."""
        self._check_input_dim(input)
        if not self.training or within(self.process_set, "SyncBatchNorm").size == 1:
            return self._alone(input)
        with torch.no_grad():
            count, mean, variance = _moments(input, self.process_set)
            if count == 1:
                raise ValueError(f"SyncBatchNorm in training needs more than 1 value per channel; all ranks together have one: the "
                                 f"input is of shape {tuple(input.shape)}")
            if count and self.track_running_stats and self.running_mean is not None:
                self._track(count, mean, variance)
        return _Normalized.apply(input, self.weight, self.bias, mean, variance, self.eps, count, self.process_set)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm: the input is of shape {tuple(input.shape)}, not (batch, {self.num_features}, ...)")

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize by what was tracked; where that is not to be done, by this batch."""
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        factor = self._next_factor() if tracks else 0.0
        used = tracks or not self.training
        return functional.batch_norm(input, self.running_mean if used else None, self.running_var if used else None, self.weight,
                                     self.bias, self.training or self.running_mean is None, factor, self.eps)

    def _next_factor(self) -> float:
        """Count a batch, and return its weight in the running statistics."""
        self.num_batches_tracked.add_(1)
        return 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum

    def _track(self, count: float, mean: torch.Tensor, variance: torch.Tensor) -> None:
        factor = self._next_factor()
        for running, now in (self.running_mean, mean), (self.running_var, variance * (count / (count - 1))):
            running.mul_(1 - factor).add_(now.to(running), alpha=factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
        """Return the module with every BatchNorm in it replaced; parameters and running statistics stay the same tensors.

        A BatchNorm itself is not changed: use what is returned.
        """
        if isinstance(module, _BatchNorm):
            return cls._like(module, process_set)
        for name, child in module._modules.items():      # named_children() leaves out a child's second name
            if child is not None:
                module._modules[name] = cls.convert_sync_batchnorm(child, process_set)
        return module

    @classmethod
    def _like(cls, module: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if not module.num_features:                      # a lazy one
            raise ValueError(f"{type(module).__name__} does not know its number of features yet: convert it after a first batch")
        made = cls(module.num_features, module.eps, module.momentum, False, False, process_set)
        made.affine, made.track_running_stats, made.training = module.affine, module.track_running_stats, module.training
        made.weight, made.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(made, name, getattr(module, name))
        return made


class _Normalized(torch.autograd.Function):
    """The input normalized by moments of all ranks' batches, which depend on the input as well."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor,
                variance: torch.Tensor, eps: float, count: float, process_set: ProcessSet) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.count, ctx.process_set, ctx.bias = eps, count, process_set, None if bias is None else bias.dtype
        if not input.numel():
            return torch.empty_like(input)
        dtype = _wide(input)
        return functional.batch_norm(input, mean.to(dtype), variance.to(dtype), _to(weight, dtype), _to(bias, dtype), eps=eps)

    @staticmethod
    @once_differentiable
    @eager
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        dtype = _wide(input)
        wide, (whole, of_weight, of_bias, *_) = input.to(dtype), ctx.needs_input_grad
        parts = torch.zeros(2, mean.numel(), dtype=torch.float64, device=input.device)       # of weight, and of bias
        grad_input = torch.zeros_like(wide)
        if input.numel():                                # as if the moments were constants
            grad_input, *found = _native_backward(grad.to(dtype), wide, _to(weight, dtype), mean.to(dtype), variance.to(dtype),
                                                  None, None, False, ctx.eps, [whole, True, True])
            parts = torch.stack(found).double()
        if whole:
            scale = torch.rsqrt(variance + ctx.eps)
            of_scale, of_shift = _summed(parts, "backward", ctx.process_set) / max(ctx.count, 1)
            factor = scale if weight is None else scale * weight.double()
            slope = -factor * scale * of_scale
            constant = -factor * of_shift - slope * mean
            grad_input.addcmul_(wide, _by_channel(slope, wide)).add_(_by_channel(constant, wide))
        return (grad_input.to(input.dtype) if whole else None, parts[0].to(weight.dtype) if of_weight else None,
                parts[1].to(ctx.bias) if of_bias else None, *[None] * 5)


def _moments(input: torch.Tensor, process_set: ProcessSet) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return how many values of a channel all ranks have together, and means and variances of the channels in float64.

    By sums, to which a rank that has joined can add zeros.
    """
    channels = input.shape[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if input.numel():
        count, dtype = input.numel() // channels, _wide(input)
        # The dtype of the results is that of the running statistics.
        nothing = (None, None) if dtype == input.dtype else torch.zeros(2, channels, dtype=dtype, device=input.device)
        mean, variance = (found.double() for found in torch.batch_norm_update_stats(input, *nothing, 0.0))
        sums = torch.cat([sums.new_ones(1), mean, variance + mean * mean]) * count
    sums = _summed(sums, "forward", process_set)
    count = sums[0].item()
    mean, squares = (sums[1:] / max(count, 1)).split(channels)
    return count, mean, (squares - mean * mean).clamp_(min=0)


def _summed(parts: torch.Tensor, way: str, process_set: ProcessSet) -> torch.Tensor:
    """Return the sum over the ranks. Calls wait for it, so those of one length can share a name: they pair by their order."""
    host = torch.empty_like(parts, device="cpu").copy_(parts)
    array = array_of(host)
    with translated():
        engine().allreduce(array, array, name=f"sync_batch_norm.{way}.{array.size}",
                           process_set=within(process_set, "SyncBatchNorm"))
    return host.to(parts.device)


def _wide(input: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in."""
    return input.dtype if input.dtype in (torch.float32, torch.float64) else torch.float32


def _to(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _by_channel(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return values.to(input.dtype).view(1, -1, *[1] * (input.dim() - 2))
