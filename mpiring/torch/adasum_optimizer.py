"""The DistributedOptimizer of op=Adasum: each rank takes a step of its own, and the steps are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mpiring.torch.buckets import Slot
from mpiring.torch.eager import eager
from mpiring.torch.exceptions import translated
from mpiring.torch.optimizer import DistributedMethods, named_by_place, scales_itself
from mpiring.torch.process_sets import engine, within
from mpiring.torch.reducer import Reducer
from mpiring.torch.tensors import array_of, stream_of, tensor_of


class AdasumMethods(DistributedMethods):
    """The methods of an optimizer whose steps are combined. Each rank's state follows its own gradients."""

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: without the others' steps there is none."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @eager
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take a step, and replace it by the Adasum of all ranks' steps."""
        mine = self._distribution
        mine.reducer.watch(named_by_place(self.param_groups))
        slots = [slot for slot in mine.reducer.slots if slot.param.requires_grad]
        before = [slot.param.detach().clone() for slot in slots]
        result = mine.plain_step(self, closure, *args, **kwargs)
        mine.reducer.reset()
        with torch.no_grad():
            _combine(mine.reducer, slots, before)
        return result

    @DistributedMethods._step_supports_amp_scaling.getter
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the plain optimizer unscales gradients itself: nothing is reduced before its step."""
        return scales_itself(self)


AdasumMethods.step.hooked = True


def _combine(reducer: Reducer, slots: list[Slot], before: list[torch.Tensor]) -> None:
    """Move the parameters from where they were by the Adasum of all ranks' moves; not at all, where that fails."""
    compression, link = reducer.options.compression, reducer.link
    try:
        sent = [compression.compress(_move(slot, start)) for slot, start in zip(slots, before)]
        with stream_of(before[0]), translated():
            handle = engine().grouped_allreduce_async([array_of(tensor) for tensor, _ in sent], name=f"{reducer.name} steps",
                                                      op=link.op, process_set=within(link.process_set, "DistributedOptimizer"))
            moves = engine().synchronize(handle)
    except Exception:
        for slot, start in zip(slots, before):
            slot.param.copy_(start)
        raise
    for slot, start, move, (_, ctx) in zip(slots, before, moves, sent):
        slot.param.copy_(start.add_(compression.decompress(tensor_of(move), ctx)))


def _move(slot: Slot, start: torch.Tensor) -> torch.Tensor:
    """Return how far a step went; in the same tensor every time, by which error feedback knows it."""
    if slot.view is None:
        slot.view = torch.empty_like(start)
    return torch.sub(slot.param, start, out=slot.view)
