"""Watches the parameters of an optimizer: which gradients are complete, and in which buckets they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI

from mpiring.torch.buckets import Alone, Bucket, Link, NarrowBucket, Room, Slot, Sparse, arrange, made
from mpiring.torch.compression import NoneCompressor, casts, wire
from mpiring.torch.eager import eager
from mpiring.torch.exceptions import HorovodInternalError, translated
from mpiring.torch.process_sets import engine, within

_TOO_MANY = ("Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
             "backward_passes_per_step to accumulate gradients locally.")

_NUMBERS: Counter[tuple[int, ...]] = Counter()
"""How many optimizers there were among some ranks: all of these count alike."""


class Options(NamedTuple):
    """What an optimizer was told about its gradients. groups: a number, or lists of parameters that go together."""

    compression: Any
    op: int
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool


class Reducer:
    """The gradients of one optimizer. Knows the parameters, but not the optimizer, with which it ends."""

    def __init__(self, link: Link, options: Options, passes: int):
        self.link, self.options, self.passes = link, options, passes
        ranks = within(link.process_set, "DistributedOptimizer").ranks
        self.name = f"optimizer {_NUMBERS[ranks]}"
        _NUMBERS[ranks] += 1
        self.slots: list[Slot] = []
        self.known: set[int] = set()                     # the parameters, by identity
        self.unplaced: list[Slot] = []                   # for which there is no bucket
        self.carriers: list[Any] = []
        self.order: list[str] = []                       # names of unplaced parameters, as their gradients came
        self.buckets = 0
        self.handles: list[Any] = []

    # What backward() does

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Learn of parameters; of those known already nothing is new."""
        for name, param in named:
            if id(param) not in self.known:
                self.known.add(id(param))
                slot = Slot(param, name, self.passes)
                self.slots.append(slot)
                self.unplaced.append(slot)
                if param.is_floating_point() or param.is_complex():
                    self.handles.append(_hooked(param, self._hook(slot)))

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        order = self.order

        @eager
        def hook(param: torch.Tensor) -> None:
            """Note that a gradient was accumulated. Runs for every parameter in every pass, so it asks for little."""
            slot.left = left = slot.left - 1
            if left:
                if left < 0:
                    raise AssertionError(_TOO_MANY)
                return
            carrier = slot.carrier
            if carrier is None:
                order.append(slot.name)
                return
            if not slot.late:
                carrier.take(slot)
            carrier.missing = missing = carrier.missing - 1
            if not missing:
                carrier.send()

        return hook

    def touched(self) -> bool:
        """Tell whether backward() has made gradients that were not reduced."""
        passes = self.passes
        return any([slot.left != passes for slot in self.slots])

    def set_passes(self, passes: int) -> None:
        """Set how many passes make a gradient complete."""
        self.passes = passes
        for slot in self.slots:
            slot.left = passes

    def close(self) -> None:
        """Let the parameters go."""
        for handle in self.handles:
            handle.remove()
        for slot in self.slots:
            slot.carrier = slot.view = None
        self.carriers = []

    # What synchronize() does

    def synchronize(self) -> None:
        """Reduce what is not on its way yet, and wait for all of it."""
        errors: list[Exception] = []
        carriers = self._everything()
        for carrier in carriers:
            if carrier.handle is None:
                _attempt(errors, carrier.complete) and _attempt(errors, carrier.send)
        for carrier in carriers:                         # whatever has failed: nothing stays on its way
            _attempt(errors, carrier.finish)
        self.reset()
        if errors:
            raise errors[0]

    def reset(self) -> None:
        """Begin a new step."""
        passes = self.passes
        for slot in self.slots:
            slot.left = passes
        self.order.clear()

    def _everything(self) -> list[Any]:
        """Return what reduces all gradients, made now as far as there are new ones."""
        if engine() is not self.link.engine:             # the buckets are another one's
            self.link.engine = engine()
            self.unplaced, self.carriers = list(self.slots), []
            for slot in self.slots:
                slot.carrier = None
        for_now = self._place() if any([slot.param.requires_grad for slot in self.unplaced]) else []
        return [*self.carriers, *for_now]

    def _place(self) -> list[Any]:
        """Make buckets for the parameters that have none; return those for this step alone.

        The ranks agree first: about the parameters; which of them need gradients, and which sparse ones, on any rank; in which
        order the first rank's came. Where a rank has joined, there can be no buckets: gradients are reduced one by one meanwhile.
        """
        fresh = sorted(self.unplaced, key=lambda slot: slot.name)
        everyone = self._agreed(fresh)
        kinds = self._reduced("kinds", [self._kind(slot) for slot in fresh], np.uint8, MPI.MAX)
        live = {slot.name: (slot, kind) for slot, kind in zip(fresh, kinds.tolist()) if kind}
        if not everyone:
            return [self._alone(slot, NoneCompressor) for slot, kind in live.values()]
        names = dict.fromkeys([*self._first_order(), *(slot.name for slot in reversed(self.unplaced))])
        chosen = [live[name] for name in names if name in live]
        self._carry([slot for slot, kind in chosen if kind == 1], [(slot, kind - 1) for slot, kind in chosen if kind > 1])
        self.unplaced = [slot for slot in self.unplaced if slot.carrier is None]
        return []

    def _carry(self, dense: list[Slot], sparse: list[tuple[Slot, int]]) -> None:
        found: list[Any] = [Sparse(slot, f"{self.name} {slot.name}", self.link, self.options.op, dims) for slot, dims in sparse]
        compression = self.options.compression
        if compression is NoneCompressor or casts(compression):
            found += self._buckets(arrange(dense, self._groups()))
        else:
            found += [self._alone(slot, compression) for slot in dense]
        for carrier in found:
            for slot in carrier.slots:
                slot.carrier = carrier
        self.carriers += found

    def _buckets(self, parts: list[list[Slot]]) -> list[Bucket]:
        compression = self.options.compression
        first, self.buckets = self.buckets, self.buckets + len(parts)
        names = [f"{self.name} bucket {number}" for number in range(first, self.buckets)]
        dtypes = [wire(compression, slots[0].param.dtype) for slots in parts]
        rooms = made([Room(sum(slot.param.numel() for slot in slots), dtype, slots[0].param.device)
                      for slots, dtype in zip(parts, dtypes)], self.link)
        return [Bucket(slots, name, self.link, room) if room.dtype == slots[0].param.dtype else
                NarrowBucket(slots, name, self.link, room, compression) for slots, name, room in zip(parts, names, rooms)]

    def _alone(self, slot: Slot, compression: Any) -> Alone:
        return Alone(slot, f"{self.name} {slot.name}", self.link, compression)

    def _kind(self, slot: Slot) -> int:
        """Return 0 for a frozen parameter, 1 for one with a dense gradient, 1 + the dimensions of the indices of a sparse one."""
        grad = slot.param.grad
        if slot.left and not slot.param.requires_grad:
            return 0
        return 1 if grad is None or not grad.is_sparse or self.options.sparse_as_dense else 1 + grad.sparse_dim()

    def _groups(self) -> dict[Slot, int]:
        groups = self.options.groups
        if not groups:
            return {}
        if isinstance(groups, int):
            return {slot: number for number, part in enumerate(np.array_split(np.arange(len(self.slots)), groups))
                    for slot in [self.slots[index] for index in part]}
        number_of = {id(param): number for number, params in enumerate(groups) for param in params}
        return {slot: number_of[id(slot.param)] for slot in self.slots if id(slot.param) in number_of}

    # How ranks agree

    def _agreed(self, slots: list[Slot]) -> bool:
        """Tell whether all ranks are here; HorovodInternalError, on all of them, where they have other parameters."""
        signatures = [slot.signature() for slot in slots]
        mine = int.from_bytes(blake2b(repr(signatures).encode(), digest_size=4).digest(), "big")
        sums = self._reduced("parameters", [1, mine, *divmod(mine * mine, 1 << 32)], np.int64, MPI.SUM).tolist()
        here, total, squares = sums[0], sums[1], (sums[2] << 32) + sums[3]
        if here * squares != total * total:              # of a rank that has joined all are 0
            raise HorovodInternalError(self._difference(signatures, here))
        return here == within(self.link.process_set, "DistributedOptimizer").size

    def _difference(self, signatures: list[tuple], here: int) -> str:
        inner, text = within(self.link.process_set, "DistributedOptimizer"), "the parameters of the optimizer differ between ranks"
        if here < inner.size:
            return text
        with translated():
            found = self.link.engine.allgather_object(signatures, name=f"{self.name} differences", process_set=inner)
        rank, other = next((rank, other) for rank, other in zip(inner.ranks, found) if other != found[0])
        for one, another in zip(found[0], other):
            if one != another:
                return f"{text}: rank {inner.ranks[0]} has {_shown(one)}, rank {rank} has {_shown(another)}"
        return f"{text}: rank {inner.ranks[0]} has {len(found[0])}, rank {rank} has {len(other)}"

    def _first_order(self) -> list[str]:
        inner = within(self.link.process_set, "DistributedOptimizer")
        with translated():
            return self.link.engine.broadcast_object(self.order, inner.ranks[0], name=f"{self.name} order", process_set=inner)

    def _reduced(self, what: str, values: list[int], dtype: Any, op: MPI.Op) -> np.ndarray:
        with translated():
            return self.link.engine.allreduce(np.array(values, dtype), name=f"{self.name} {what}", op=op,
                                              process_set=within(self.link.process_set, "DistributedOptimizer"))


def _hooked(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook for a gradient that was accumulated; on a frozen parameter too, for it may be thawed at any time."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)


def _attempt(errors: list[Exception], function: Callable[[], None]) -> bool:
    try:
        function()
    except Exception as error:
        errors.append(error)
        return False
    return True


def _shown(signature: tuple) -> str:
    name, dtype, shape, strides, device = signature
    return f"{name!r} {dtype} {shape} on {device}, strides {strides}"
