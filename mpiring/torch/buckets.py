"""Gradients on their way: many side by side in one array, or one alone; reduced when the last one of them has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from mpi4py import MPI

import mpiring
from mpiring.engine.operation import Operation
from mpiring.runtime.memory import PAGE
from mpiring.torch.exceptions import translated
from mpiring.torch.process_sets import ProcessSet, comm_among, engine, within
from mpiring.torch.tensors import array_of, stream_of, tensor_of

FIRST = 1 << 20
"""Bytes of the first bucket: it is full soon after backward() has begun, so that the exchange begins too."""

SIZE = 8 << 20
"""Bytes of the others: the more there are, the more is exchanged beside backward(), but each costs an agreement of the ranks."""

SMALL = 16 << 10
"""Bytes up to which gradients are copied into a bucket together, when it is full: a call of PyTorch's takes longer."""

_STRIDED = torch.strided

_CHANGED = ("the gradients in {} were changed between backward() and the end of their reduction: call optimizer.synchronize() "
            "first, then change them, then step() within optimizer.skip_synchronize()")


class Slot:
    """A parameter. left: backward passes until its gradient is complete; carrier: what reduces it, None before that is agreed.

    view: where its gradient is reduced, in the parameter's own strides; address: that of the view. late: whether the gradient is
    taken there only when all of its bucket have come.
    """

    __slots__ = ("address", "carrier", "late", "left", "name", "param", "view")

    def __init__(self, param: torch.Tensor, name: str, passes: int):
        self.param, self.name, self.left = param, name, passes
        self.carrier: Any = None
        self.view: torch.Tensor | None = None
        self.address, self.late = 0, False

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.param.numel() * self.param.element_size()

    def signature(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], str]:
        """Return what ranks must agree about: name, dtype, shape, order of the elements, kind of device."""
        param = self.param
        strides = tuple(stride for stride, length in zip(_strides(param), param.shape) if length > 1)
        return self.name, str(param.dtype).removeprefix("torch."), tuple(param.shape), strides, param.device.type


class Link:
    """How an optimizer's gradients are reduced: among which ranks, by which op, with which factors."""

    def __init__(self, process_set: ProcessSet, op: Any, prescale: float = 1.0, postscale: float = 1.0):
        self.process_set, self.op, self.prescale, self.postscale = process_set, op, prescale, postscale
        self.engine = engine()

    def start(self, name: str, array: Any, out: Any, tensor: torch.Tensor) -> Operation | None:
        """Send an array, which is a tensor's, on its way; None where the engine is another one than when buckets were made."""
        if engine() is not self.engine:
            return None
        with stream_of(tensor), translated():
            return self.engine.allreduce_async(array, out, name=name, op=self.op, prescale=self.prescale, postscale=self.postscale,
                                               process_set=within(self.process_set, "DistributedOptimizer"))

    def wait(self, handle: Operation) -> Any:
        """Return the result."""
        with translated():
            return self.engine.synchronize(handle)

    def comm(self) -> MPI.Comm:
        """Return a comm of the ranks for what they make together; the engine's thread is never in it."""
        inner = within(self.process_set, "DistributedOptimizer")
        if inner is self.engine.everybody:
            return self.engine.comm
        if inner not in _COMMS:
            _COMMS[inner] = comm_among(inner.ranks, self.engine.comm)
        return _COMMS[inner]


_COMMS: WeakKeyDictionary[Any, MPI.Comm] = WeakKeyDictionary()
"""By the engine's process sets. They are not freed, which is collective: nobody knows when all ranks let go of a set."""


class Bucket:
    """Gradients side by side in one array in memory that the ranks of a node share; reduced where they are."""

    def __init__(self, slots: Sequence[Slot], name: str, link: Link, flat: torch.Tensor):
        """Give every slot its place in `flat`, which has a place for each element."""
        self.slots, self.name, self.link, self.flat = slots, name, link, flat
        self.missing, self.version = len(slots), 0
        self.frozen: list[Slot] = []
        self.handle: Any = None
        self.array = array_of(flat, in_place=True)
        place = 0
        for slot in slots:
            slot.view = self._view(slot, place)
            slot.address, slot.late = slot.view.data_ptr(), slot.nbytes <= SMALL
            place += slot.param.numel()

    def take(self, slot: Slot) -> None:
        """Have a parameter's gradient in its place: a copy, where it is not there already; zeros, where there is none."""
        param, view = slot.param, slot.view
        grad = param.grad
        if view.data_ptr() != slot.address:              # as model.to() has it, which gives gradients other memory
            view = self._replaced(slot)
        if grad is view:
            return
        try:
            if grad is None:
                view.zero_()
            else:
                view.copy_(_plain(grad) if grad.requires_grad or grad.layout is not _STRIDED else grad)
            param.grad = view
        except RuntimeError as error:                    # as PyTorch has it where dtype, shape or device are not the parameter's
            raise ValueError(f"parameter {slot.name!r} is {_words(param)}, but was {_words(view)} when its gradient was reduced "
                             "first: make the DistributedOptimizer after such changes") from error

    def _replaced(self, slot: Slot) -> torch.Tensor:
        place = (slot.address - self.flat.data_ptr()) // self.flat.element_size()
        slot.view = self._view(slot, place)
        return slot.view

    def _view(self, slot: Slot, place: int) -> torch.Tensor:
        return self.flat.as_strided(slot.param.shape, _strides(slot.param), self.flat.storage_offset() + place)

    def leave(self, slot: Slot) -> None:
        """Give zeros for a frozen parameter, whose gradient stays what it is if it is frozen everywhere."""
        self.frozen.append(slot)
        if slot.param.grad is slot.view:
            slot.param.grad = slot.view.clone()
        slot.view.zero_()

    def complete(self) -> None:
        """Have all gradients in their places, also those that backward() has not made."""
        for slot in self.slots:
            if slot.left and not slot.param.requires_grad:
                self.leave(slot)
            else:
                self.take(slot)

    def gather(self) -> None:
        """Take the small gradients, all at once where that can be."""
        found = []
        for slot in self.slots:
            if slot.late and not slot.left:              # others were taken, or left, in complete
                grad, view = slot.param.grad, slot.view
                if (grad is None or grad is view or grad.requires_grad or grad.layout is not _STRIDED
                        or view.data_ptr() != slot.address):
                    self.take(slot)
                else:
                    found.append((slot, view, grad))
        try:
            if found:
                torch._foreach_copy_([view for _, view, _ in found], [grad for _, _, grad in found])
            for slot, view, _ in found:
                slot.param.grad = view
        except RuntimeError:                             # a parameter was changed: take says which
            for slot, _, _ in found:
                self.take(slot)

    def send(self) -> None:
        """Send the gradients on their way."""
        self.gather()
        self.version = self.flat._version
        self.handle = self.link.start(self.name, self.array, self.array, self.flat)

    def finish(self) -> None:
        """Wait until the gradients are reduced; nothing is on its way then, also where that fails."""
        handle, self.handle, self.missing = self.handle, None, len(self.slots)
        frozen, self.frozen = self.frozen, []
        if handle is not None:
            self.receive(self.link.wait(handle))
            for slot in frozen:
                if slot.view.any():                      # of ranks where it is not frozen; or the weights would differ
                    slot.param.grad = slot.view

    def receive(self, result: Any) -> None:
        """Have the reduced gradients where they belong."""
        if self.flat._version != self.version:
            raise RuntimeError(_CHANGED.format(self.name))


class NarrowBucket(Bucket):
    """Gradients that travel in a narrower dtype, cast all at once."""

    def __init__(self, slots: Sequence[Slot], name: str, link: Link, narrow: torch.Tensor, compression: Any):
        super().__init__(slots, name, link, torch.zeros(narrow.numel(), dtype=slots[0].param.dtype, device=narrow.device))
        self.narrow, self.compression = narrow, compression
        self.array = array_of(narrow, in_place=True)

    def send(self) -> None:
        """As Bucket."""
        self.gather()
        self.compression.pack(self.flat, self.narrow)
        super().send()

    def receive(self, result: Any) -> None:
        """As Bucket."""
        super().receive(result)
        self.flat.copy_(self.narrow)


class Alone(Bucket):
    """One gradient that goes through a compression of the user's, or cannot wait for the ranks to make a bucket together."""

    def __init__(self, slot: Slot, name: str, link: Link, compression: Any):
        super().__init__([slot], name, link, torch.zeros(slot.param.numel(), dtype=slot.param.dtype, device=slot.param.device))
        self.compression, self.ctx = compression, None

    def send(self) -> None:
        """As Bucket."""
        self.gather()
        self.version = self.flat._version
        tensor, self.ctx = self.compression.compress(self.slots[0].view)
        self.handle = self.link.start(self.name, array_of(tensor), None, tensor)

    def receive(self, result: Any) -> None:
        """As Bucket."""
        super().receive(result)
        self.slots[0].view.copy_(self.compression.decompress(tensor_of(result), self.ctx))
        self.ctx = None


class Sparse:
    """One sparse gradient: the ranks gather their rows."""

    def __init__(self, slot: Slot, name: str, link: Link, op: int, sparse_dim: int):
        """sparse_dim: the dimensions of a gradient's indices, for ranks that have none."""
        self.slots, self.name, self.link, self.op, self.sparse_dim = [slot], name, link, op, sparse_dim
        self.missing, self.handle = 1, None

    def take(self, slot: Slot) -> None:
        """Leave a gradient where it is: it is sent from there."""

    def complete(self) -> None:
        """Nothing is missing: a rank without a gradient has no rows."""

    def send(self) -> None:
        """Send the rows on their way."""
        from mpiring.torch.mpi_ops import sparse_allreduce_async
        if engine() is self.link.engine:
            with translated():
                self.handle = sparse_allreduce_async(self._rows(), self.name, self.op, self.link.process_set)

    def _rows(self) -> torch.Tensor:
        param, grad = self.slots[0].param, self.slots[0].param.grad
        if grad is None or (self.slots[0].left and not param.requires_grad):
            grad = torch.sparse_coo_tensor(torch.empty(self.sparse_dim, 0, dtype=torch.int64, device=param.device),
                                           torch.empty(0, *param.shape[self.sparse_dim:], dtype=param.dtype, device=param.device),
                                           param.shape, check_invariants=False)
        return (grad if grad.is_sparse else grad.detach().to_sparse(self.sparse_dim)).coalesce()

    def finish(self) -> None:
        """Wait for the sum of all rows."""
        handle, self.handle, self.missing = self.handle, None, 1
        if handle is not None:
            with translated():
                found = handle()
            slot = self.slots[0]
            if slot.param.requires_grad or not slot.left or found._nnz():
                slot.param.grad = found


def arrange(slots: Iterable[Slot], groups: dict[Slot, int]) -> list[list[Slot]]:
    """Return what goes into one bucket, in the order in which slots are complete: of one dtype and device, and of one group."""
    filling: dict[tuple, tuple[list[Slot], int]] = {}
    begun: set[tuple] = set()
    found = []
    for slot in slots:
        group = groups.get(slot)
        key = slot.param.dtype, slot.param.device, group
        bucket, used = filling.get(key, (None, 0))
        if bucket is None or (group is None and used + slot.nbytes > (SIZE if key in begun else FIRST)):
            begun.update([key] if bucket is not None else [])
            bucket, used = [], 0
            found.append(bucket)
        bucket.append(slot)
        filling[key] = bucket, used + slot.nbytes
    return found


class Room(NamedTuple):
    """Memory that a bucket needs."""

    length: int
    dtype: torch.dtype
    device: torch.device


def made(rooms: Sequence[Room], link: Link) -> list[torch.Tensor]:
    """Make zeros: those in host memory are shared by the ranks of a node, and all in one piece. Collective among a link's ranks.

    Each is a tensor of its own, not a view of the whole, for PyTorch counts together what is done to views of one tensor.
    """
    sizes = [room.length * room.dtype.itemsize if room.device.type == "cpu" else 0 for room in rooms]
    ends = [*accumulate(-(-size // PAGE) * PAGE for size in sizes)]
    if not any(sizes):
        return [torch.zeros(room.length, dtype=room.dtype, device=room.device) for room in rooms]
    with translated():
        whole = mpiring.empty(ends[-1], np.uint8, link.comm())
    return [torch.from_numpy(whole[start:start + size]).view(room.dtype) if room.device.type == "cpu" else
            torch.zeros(room.length, dtype=room.dtype, device=room.device) for room, size, start in zip(rooms, sizes, [0, *ends])]


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that can be copied without autograd taking note of it."""
    grad = grad.detach()
    return grad if grad.layout is _STRIDED else grad.to_dense()


def _strides(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient: the parameter's own, if it has every element once and none between."""
    return torch.empty_like(param, device="meta").stride()


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
