"""DistributedOptimizer: any of PyTorch's optimizers, with gradients that are reduced among the ranks while others are computed."""

from __future__ import annotations

import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mpiring.torch.basics import Basics
from mpiring.torch.buckets import Link
from mpiring.torch.compression import Compression, checked
from mpiring.torch.eager import eager
from mpiring.torch.process_sets import ProcessSet, engine, global_process_set, within
from mpiring.torch.reducer import Options, Reducer
from mpiring.torch.submissions import engine_op
from mpiring.torch.tensors import array_of

_PENDING = ("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
            "This is prohibited as it can cause a race condition.")

_TWICE = ("optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). You may want to "
          "consider using optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.")

BY_CALL, BY_SCALER = "synchronize()", "GradScaler"
"""Who had the gradients reduced."""


class Distribution:
    """What a distributed optimizer has beside a plain one. reducer: None where there is nothing to reduce, as on one rank.

    plain: its class. origin: the optimizer that it was made from. synchronized: who had the gradients of this step reduced.
    """

    def __init__(self, origin: torch.optim.Optimizer, reducer: Reducer | None):
        self.plain, self.origin, self.reducer = type(origin), origin, reducer
        self.synchronized: str | None = None
        self.should_synchronize = True
        own = vars(origin).get("step")                   # where a learning-rate scheduler has one, it only notes the call
        self._own_step = None if own is None or hasattr(own, "_wrapped_by_lr_sched") else own

    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the gradients, and wait."""
        if self.reducer is not None:
            self.reducer.watch(named_by_place(optimizer.param_groups))  # groups may have come through the plain optimizer
            self.reducer.synchronize()

    def reduced(self) -> bool:
        """Tell whether synchronize() was called since backward()."""
        return self.synchronized == BY_CALL and not (self.reducer is not None and self.reducer.touched())

    def plain_step(self, optimizer: torch.optim.Optimizer, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step with the gradients that there are."""
        self.synchronized = None
        self.origin._opt_called = True                   # for a scheduler that was made before
        arguments = args if closure is None and not args else (closure, *args)
        if self._own_step is not None:
            return self._own_step(*arguments, **kwargs)
        return self.plain.step(optimizer, *arguments, **kwargs)


class DistributedMethods:
    """The methods that a distributed optimizer has instead of the plain one's. Its class is made of these and the plain class."""

    @eager
    def synchronize(self) -> None:
        """Wait until the gradients are reduced on all ranks."""
        self._distribution.reduce(self)
        self._distribution.synchronized = BY_CALL

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let step() take the gradients as they are: synchronize() was called before."""
        mine, before = self._distribution, self._distribution.should_synchronize
        mine.should_synchronize = False
        try:
            yield
        finally:
            mine.should_synchronize = before

    @eager
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, and take a step. Gradients that the closure makes are reduced each time, and so is its loss."""
        mine = self._distribution
        if mine.should_synchronize:
            closure = _reduced(self, closure)
        return mine.plain_step(self, closure, *args, **kwargs)

    @eager
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the plain optimizer's; AssertionError while gradients are on their way."""
        mine = self._distribution
        if mine.reducer is not None and mine.reducer.touched():
            raise AssertionError(_PENDING)
        mine.synchronized = None
        mine.plain.zero_grad(self, *args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many times backward() is called before a step."""
        self.backward_passes_per_step = checked_passes(passes)
        if self._distribution.reducer is not None:
            self._distribution.reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the plain optimizer's; the new parameters' gradients are reduced too."""
        self._distribution.plain.add_param_group(self, param_group)
        if self._distribution.reducer is not None:
            self._distribution.reducer.watch(named_by_place(self.param_groups))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep the lists and dicts that schedulers and the plain optimizer know, with what is loaded."""
        groups, kept = self.param_groups, self.state
        self._distribution.plain.__setstate__(self, state)
        if self.param_groups is not groups:
            groups[:], self.param_groups = self.param_groups, groups
        if self.state is not kept:
            loaded, self.state = self.state, kept
            kept.clear()
            kept.update(loaded)

    def __reduce__(self) -> tuple:
        """Copy and pickle as the plain optimizer: the hooks stay with this one."""
        plain = self._distribution.plain
        return _restored, (plain, plain.__getstate__(self))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the plain optimizer unscales gradients itself.

        GradScaler.step asks this before all else, then looks for infinities: gradients are reduced now: all ranks find the same.
        """
        mine = self._distribution
        if mine.should_synchronize and not mine.reduced():
            mine.reduce(self)
            mine.synchronized = BY_SCALER
        return scales_itself(self)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value


def scales_itself(optimizer: Any) -> bool:
    """Tell whether the plain optimizer unscales gradients itself."""
    plain = getattr(optimizer._distribution.plain, "_step_supports_amp_scaling", False)
    return vars(optimizer).get("_step_supports_amp_scaling", plain)


DistributedMethods.step.hooked = True                    # or PyTorch would run a step's hooks here and in the plain step


def _reduced(optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Reduce the gradients if there is no closure, else return one that does so when it has been called."""
    mine = optimizer._distribution
    if mine.synchronized == BY_CALL:
        warnings.warn(_TWICE, stacklevel=3)
    if mine.reducer is None:
        return closure
    if closure is None:
        if mine.synchronized is None or mine.reducer.touched():
            mine.reduce(optimizer)
        return None

    def called() -> Any:
        loss = closure()
        if not mine.reduced():
            mine.reduce(optimizer)
        mine.synchronized = None
        return _loss_of_all(mine.reducer, loss)

    return called


def _loss_of_all(reducer: Reducer, loss: Any) -> Any:
    """Reduce a closure's loss like the gradients: optimizers that search along a line decide by it, and must do so alike."""
    value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss) if isinstance(loss, float) else None
    if value is None or value.numel() != 1 or not value.is_floating_point():
        return loss
    total, link = value.clone(), reducer.link
    array = array_of(total, in_place=True)
    link.wait(link.start(f"{reducer.name} loss", array, array, total))
    return total if isinstance(loss, torch.Tensor) else total.item()


def _restored(plain: type, state: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = plain.__new__(plain)
    optimizer.__setstate__(state)
    return optimizer


def named_by_place(groups: Iterable[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return the names that parameters have by their groups and places."""
    return [(f"allreduce.noname.{number}.{place}", param)
            for number, group in enumerate(groups) for place, param in enumerate(group["params"])]


def checked_names(named_parameters: Any, groups: list[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return the names of all parameters; ValueError for a name twice, and where some parameter has none."""
    if named_parameters is None:
        return named_by_place(groups)
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor)
           for pair in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    params = [param for group in groups for param in group["params"]]
    names = {id(param): name for name, param in reversed(named)}
    without = [str(id(param)) for param in params if id(param) not in names]
    if without:
        raise ValueError("named_parameters was specified, but one or more model parameters were not named. Python object ids: "
                         + ", ".join(without))
    return [(names[id(param)], param) for param in params]


def checked_passes(passes: Any) -> int:
    """Return a number of passes; ValueError for none."""
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, but is {passes!r}")
    return passes


def _checked_groups(groups: Any, num_groups: int) -> Any:
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return groups
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[int] = set()
    for param in [param for members in groups for param in members]:
        if not isinstance(param, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(param) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(param))
    return groups


def remade(optimizer: torch.optim.Optimizer, methods: type, reducer: Reducer | None, passes: int) -> torch.optim.Optimizer:
    """Return an optimizer of a subclass with other methods, which shares parameter groups, state and hooks with the plain one."""
    plain = type(optimizer)
    body = {name: value for cls in reversed(methods.__mro__[:-1]) for name, value in vars(cls).items()
            if name not in ("__dict__", "__weakref__")}
    made = types.new_class(plain.__name__, (plain,), exec_body=lambda namespace: namespace.update(body))
    new = made.__new__(made)
    vars(new).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    new._distribution = Distribution(optimizer, reducer)
    new.backward_passes_per_step = passes
    if reducer is not None:
        weakref.finalize(new, reducer.close).atexit = False
    return new


def DistributedOptimizer(
        optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Basics.Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set) -> torch.optim.Optimizer:
    """Return an optimizer like this one, whose gradients are reduced among the ranks before each step.

    The new one is of a subclass of the optimizer's class and shares its parameter groups and state; use it instead. Gradients are
    reduced while backward() computes others; step() waits for them. `param.grad` then is a view of a buffer that the next
    backward() writes to: clone what is to be kept.

    named_parameters: names for all parameters (model.named_parameters()), by which the ranks' pair. compression: of gradients on
    their way. backward_passes_per_step: calls of backward() before each step, whose gradients add up. op: hvd.Average, Sum or
    Adasum. gradient_predivide_factor: of an average, divides by this before the sum, and by the rest afterwards. groups: parameters
    whose gradients go together: lists of them, or how many groups to make. sparse_as_dense: make sparse gradients dense first.
    process_set: the ranks that take part; others take plain steps.

    Raises ValueError for wrong arguments and before init. What goes wrong between ranks, backward(), synchronize() and step() raise
    as HorovodInternalError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if hasattr(optimizer, "_distribution"):
        raise ValueError("optimizer is a DistributedOptimizer already")
    if gradient_predivide_factor != 1.0 and op != Basics.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    options = Options(checked(compression, "compression"), op, _checked_groups(groups, num_groups), sparse_as_dense)
    named, passes = checked_names(named_parameters, optimizer.param_groups), checked_passes(backward_passes_per_step)
    engine_op(op)
    engine()
    if not process_set.included() or process_set.size() == 1:
        return remade(optimizer, DistributedMethods, None, passes)
    reducer = Reducer(_link(process_set, op, gradient_predivide_factor), options, passes)
    reducer.watch(named)
    if op == Basics.Adasum:
        from mpiring.torch.adasum_optimizer import AdasumMethods
        return remade(optimizer, AdasumMethods, reducer, passes)
    return remade(optimizer, DistributedMethods, reducer, passes)


def _link(process_set: ProcessSet, op: int, predivide: float) -> Link:
    if predivide == 1.0:
        return Link(process_set, engine_op(op))
    size = within(process_set, "DistributedOptimizer").size
    return Link(process_set, engine_op(Basics.Sum), 1.0 / predivide, predivide / size)
