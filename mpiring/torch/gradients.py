"""Operations that autograd goes back through. Their gradients are collective too, and Horovod's, factors included.

Going back through a sum or a mean is a sum or a mean; through what moves rows, a mean (allgather, broadcast), as if the ranks'
losses were averaged. Where ranks go forward by name, in an order of their own, they go back by name.
"""

from __future__ import annotations

from typing import Any

import torch

from mpiring.torch import submissions
from mpiring.torch.basics import Basics
from mpiring.torch.eager import eager
from mpiring.torch.handles import wait
from mpiring.torch.process_sets import ProcessSet, engine
from mpiring.torch.tensors import tensor_of

LINEAR = (Basics.Average, Basics.Sum, Basics.Adasum)
"""Ops through which gradients go as values do."""


def back(name: str | None, what: str = "gradient") -> str | None:
    """Return the name of what goes back through a named operation."""
    return f"{name} ({what})" if name else None


class Allreduce(torch.autograd.Function):
    """A reduction of a group of tensors."""

    @staticmethod
    @eager
    def forward(ctx: Any, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet, grouped: bool,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reduce the tensors."""
        operation = submissions.allreduce(tensors, name, op, prescale, postscale, process_set, False, grouped)
        result = wait(operation)
        results = tuple(tensor_of(array) for array in (result if grouped else [result]))
        ctx.call = op, name, prescale, postscale, process_set, grouped
        if op not in LINEAR:
            ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Reduce the gradients by the same op, or go back to the operands that a minimum, maximum or product came from."""
        op, name, prescale, postscale, process_set, grouped = ctx.call
        if op in LINEAR:
            return (*[None] * 6, *Allreduce.apply(op, back(name), prescale, postscale, process_set, grouped, *grads))
        totals = Allreduce.apply(Basics.Sum, back(name), 1.0, 1.0, process_set, True, *grads)
        saved, count = ctx.saved_tensors, len(grads)
        found = [_selected(op, *each, back(name, f"share {place}"), process_set)
                 for place, each in enumerate(zip(saved[:count], saved[count:]))]
        return (*[None] * 6, *(total * share for total, share in zip(totals, found)))


def _selected(op: int, mine: torch.Tensor, result: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Return the derivative of a minimum, maximum or product by this rank's operand; ranks that tie share it evenly."""
    def reduced(by: int, name: str | None, tensor: torch.Tensor) -> torch.Tensor:
        return Allreduce.apply(by, name, 1.0, 1.0, process_set, False, tensor)[0]

    if op != Basics.Product:
        hit = (mine == result).to(mine.dtype)
        return hit / reduced(Basics.Sum, name, hit)
    zero = mine == 0
    zeros = reduced(Basics.Sum, name, zero.to(torch.int32))
    rest = torch.where(zero, torch.ones_like(mine), mine)
    others = reduced(Basics.Product, back(name, "others"), rest) / rest
    return torch.where(zeros == zero.to(torch.int32), others, torch.zeros_like(others)).conj()


class Allgather(torch.autograd.Function):
    """A gathering of rows."""

    @staticmethod
    @eager
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, call: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather each tensor's rows."""
        operations = _all_of(tensors, name, call, lambda tensor, name: submissions.allgather(tensor, name, process_set, call))
        results = tuple(tensor_of(array) for array in wait(operations))
        place = process_set.rank()
        ctx.parts = [(sum(operation.rows[:place]), operation.rows[place]) for operation in operations]
        ctx.call = name, process_set
        return results

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Average the gradients, and keep this rank's rows."""
        name, process_set = ctx.call
        whole = Allreduce.apply(Basics.Average, back(name), 1.0, 1.0, process_set, True, *grads)
        return (None, None, None, *(grad.narrow(0, start, rows) for grad, (start, rows) in zip(whole, ctx.parts)))


class Broadcast(torch.autograd.Function):
    """A broadcast."""

    @staticmethod
    @eager
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        """Broadcast."""
        ctx.call = root_rank, name, process_set
        return tensor_of(wait(submissions.broadcast(tensor, root_rank, name, process_set, False)))

    @staticmethod
    @eager
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Average the gradients on the root; none go to others."""
        root_rank, name, process_set = ctx.call
        mean, = Allreduce.apply(Basics.Average, back(name), 1.0, 1.0, process_set, False, grad)
        return mean if engine().rank == root_rank else torch.zeros_like(grad), None, None, None


class Alltoall(torch.autograd.Function):
    """An exchange of rows."""

    @staticmethod
    @eager
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        """Exchange rows."""
        rows, received = exchanged(wait(submissions.alltoall(tensor, splits, name, process_set)))
        ctx.call = name, process_set
        ctx.shape, ctx.received = tensor.shape, received
        if splits is None:
            return rows
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    @eager
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Send the gradients' rows back."""
        name, process_set = ctx.call
        sent, _ = Alltoall.apply(grad, ctx.received, back(name), process_set)
        unsent = ctx.shape[0] - sent.shape[0]            # rows beyond the splits
        return torch.cat([sent, sent.new_zeros(unsent, *ctx.shape[1:])]) if unsent else sent, None, None, None


class Reducescatter(torch.autograd.Function):
    """A reduction of which each rank gets its rows."""

    @staticmethod
    @eager
    def forward(ctx: Any, op: int, name: str | None, prescale: float, postscale: float, process_set: ProcessSet, call: str,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Reduce each tensor, and keep this rank's rows."""
        operations = _all_of(tensors, name, call, lambda tensor, name: submissions.reducescatter(
            tensor, name, op, process_set, prescale, postscale, call))
        results = tuple(tensor_of(array) for array in wait(operations))
        ctx.factor = prescale * postscale * (process_set.size() if op == Basics.Sum else 1)
        ctx.call = op, name, process_set, call.replace("reducescatter", "allgather")
        return results

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Gather the gradients' rows."""
        op, name, process_set, call = ctx.call
        if op not in LINEAR:
            raise NotImplementedError("reducescatter has gradients for hvd.Average and hvd.Sum only")
        return (*[None] * 6, *Allgather.apply(back(name), process_set, call, *(grad * ctx.factor for grad in grads)))


def _all_of(tensors: tuple[torch.Tensor, ...], name: str | None, call: str, submit: Any) -> list[Any]:
    if call.startswith("grouped"):
        return submissions.group(tensors, name, call, submit)
    return [submit(tensors[0], name)]


def exchanged(result: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an alltoall's result in tensors: the rows, and how many came from each rank."""
    return tensor_of(result[0]), torch.tensor([*result[1]], dtype=torch.int32)
