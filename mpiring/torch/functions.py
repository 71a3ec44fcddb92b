"""Parameters, the state of optimizers, and any Python objects, from one rank to all or from all to all."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch

from mpiring.engine.process_sets import ProcessSet as EngineSet
from mpiring.torch import submissions
from mpiring.torch.eager import eager
from mpiring.torch.exceptions import HorovodInternalError, translated
from mpiring.torch.handles import wait
from mpiring.torch.process_sets import ProcessSet, engine, global_process_set, within
from mpiring.torch.tensors import array_of

try:
    from cloudpickle import CloudPickler as Pickler  # which takes lambdas and classes of __main__ along
except ImportError:
    from pickle import Pickler


@eager
def broadcast_parameters(params: Mapping[str, torch.Tensor] | Iterable[Any], root_rank: int,
                         process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks the root's tensors, in place.

    params: a dict of tensors by name, such as a state_dict(); or (name, tensor) pairs, such as named_parameters(); or tensors,
    which are paired by their order. root_rank: among all ranks, also in a process set.
    """
    named = _named_tensors(params)
    for name, tensor in named:
        _check_tensor(name, tensor)
    wait([submissions.broadcast(tensor, root_rank, name and f"parameter.{name}", process_set, True) for name, tensor in named])


def _named_tensors(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        return [*params.items()]
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"params is of type {type(params).__name__}, neither a dict of tensors nor a list of (name, tensor) pairs")
    return [tuple(each) if isinstance(each, (tuple, list)) and len(each) == 2 else (None, each) for each in params]


def _check_tensor(name: str | None, tensor: Any) -> None:
    """Refuse what cannot be filled, before anything is sent."""
    what = "a tensor of params" if name is None else f"params[{name!r}]"
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} is of type {type(tensor).__name__}, not a torch.Tensor")
    array_of(tensor, True)


# Objects

@eager
def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return the root's object, of any size, on all ranks; it is pickled, by cloudpickle where that is installed.

    obj: of other ranks it is not looked at. root_rank: among all ranks, also in a process set.
    """
    call = "broadcast_object"
    inner = within(process_set, call)
    data = _from_root(lambda: _pickled(obj), root_rank, submissions.named(call, name), inner, call)
    return obj if engine().rank == root_rank else pickle.loads(data)


@eager
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, of any size, in the order of ranks; they are pickled as in broadcast_object."""
    call, error = "allgather_object", None
    inner = within(process_set, call)
    try:
        data = _pickled(obj)
    except Exception as caught:                          # the others wait for this rank
        data, error = np.empty(0, np.uint8), caught
    with translated():
        handle = engine().allgather_async(data, name=submissions.named(call, name), process_set=inner)
        everything = engine().synchronize(handle)
    if error is not None:
        raise error
    parts = np.split(everything, np.cumsum(handle.rows)[:-1])
    failed = [rank for rank, part in zip(inner.ranks, parts) if not part.size]
    if failed:
        raise HorovodInternalError(f"{call}: rank {failed[0]} could not pickle its object")
    return [pickle.loads(part.data) for part in parts]


def _pickled(obj: Any) -> np.ndarray:
    file = BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return np.frombuffer(file.getbuffer(), np.uint8)


def _from_root(make: Callable[[], np.ndarray], root: int, name: str | None, inner: EngineSet, call: str) -> memoryview:
    """Return the bytes that the root makes; where it fails to, all ranks raise."""
    data, error, mine = np.empty(0, np.uint8), None, engine().rank == root
    if mine:
        try:
            data = make()
        except Exception as caught:
            data, error = np.frombuffer(f"{type(caught).__name__}: {caught}".encode(), np.uint8), caught
    head = np.array([data.size, error is not None])
    with translated():
        engine().broadcast(head, root, head, name=name and f"{name}.sz", process_set=inner)
        data = data if mine else np.empty(head[0], np.uint8)
        engine().broadcast(data, root, data, name=name and f"{name}.t", process_set=inner)
    if error is not None:
        raise error
    if head[1]:
        raise HorovodInternalError(f"{call}: rank {root} has failed: {data.tobytes().decode()}")
    return data.data


# Optimizers

@eager
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None,
                              process_set: ProcessSet = global_process_set) -> None:
    """Give all ranks the root's optimizer state and options of parameter groups, whatever state they have; no step is taken.

    The parameters are as many, in as many groups, on all ranks, and stay as they are. model: for Horovod's scripts; not needed.

    Raises TypeError for what is no optimizer, ValueError for an LBFGS optimizer, and where the groups differ between ranks.
    """
    call = "broadcast_optimizer_state"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{call}: optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{call}: optimizer is a torch.optim.LBFGS, whose state cannot be broadcast")
    inner = within(process_set, call)
    _check_groups(optimizer, process_set)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors: list[torch.Tensor] = []
    data = _from_root(lambda: _packed(optimizer, params, tensors), root_rank, call, inner, call)
    if engine().rank != root_rank:
        _unpack(data, optimizer, params, tensors)
    wait([submissions.broadcast(tensor, root_rank, f"optimizer.{place}", process_set, True)
          for place, tensor in enumerate(tensors)])


def _check_groups(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    call, lengths = "broadcast_optimizer_state", [len(group["params"]) for group in optimizer.param_groups]
    everyone = allgather_object((type(optimizer).__name__, lengths), call, process_set)
    (kind, first), lowest = everyone[0], process_set.ranks[0]
    for rank, (other, found) in zip(process_set.ranks, everyone):
        if other != kind:
            raise ValueError(f"{call}: the optimizers differ: rank {lowest} has {kind}, rank {rank} has {other}")
        if found != first:
            raise ValueError(f"{call}: the numbers of parameters in the optimizer's groups differ: rank {lowest} has {first}, "
                             f"rank {rank} has {found}")


class _Like(NamedTuple):
    """What a tensor must be like to take another rank's."""

    place: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...] | None
    device: str

    def made(self, params: list[torch.Tensor]) -> torch.Tensor:
        """Make it: where parameters are, if these are on a device of that type."""
        device = next((param.device for param in params if param.device.type == self.device), self.device)
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class _Packer(Pickler):
    """Pickles all but tensors, which it collects, and parameters, of which it writes the places."""

    def __init__(self, file: BytesIO, params: list[torch.Tensor], tensors: list[torch.Tensor]):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.params = {id(param): place for place, param in enumerate(params)}
        self.tensors, self.places = tensors, {}

    def persistent_id(self, obj: Any) -> int | _Like | None:
        """Return the place of a parameter, what another tensor is like, None for all else."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) in self.params:
            return self.params[id(obj)]
        if id(obj) not in self.places:
            array_of(obj, True)                          # sparse ones are refused
            self.places[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach())
        dense = torch.empty_like(obj, device="meta").stride() == obj.stride()
        return _Like(self.places[id(obj)], obj.dtype, obj.shape, obj.stride() if dense else None, obj.device.type)


class _Unpacker(pickle.Unpickler):
    """The reverse, with new tensors in place of those that were collected."""

    def __init__(self, file: BytesIO, params: list[torch.Tensor]):
        super().__init__(file)
        self.params, self.made = params, {}

    def persistent_load(self, pid: int | _Like) -> torch.Tensor:
        """Return the parameter, or the tensor."""
        if isinstance(pid, int):
            return self.params[pid]
        if pid.place not in self.made:
            self.made[pid.place] = pid.made(self.params)
        return self.made[pid.place]


def _packed(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], tensors: list[torch.Tensor]) -> np.ndarray:
    file = BytesIO()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    _Packer(file, params, tensors).dump((groups, [*optimizer.state.items()]))
    return np.frombuffer(file.getbuffer(), np.uint8)


def _unpack(data: memoryview, optimizer: torch.optim.Optimizer, params: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Replace an optimizer's state and options, in the same dicts, by those packed; their tensors are to be filled."""
    unpacker = _Unpacker(BytesIO(data), params)
    groups, state = unpacker.load()
    tensors += [tensor for _, tensor in sorted(unpacker.made.items())]
    for group, new in zip(optimizer.param_groups, groups):
        for key in group.keys() - new.keys() - {"params"}:
            del group[key]
        group.update(new)
    optimizer.state.clear()
    optimizer.state.update(state)
