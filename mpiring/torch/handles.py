"""Operations on their way, by number."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from mpiring.engine.engine import Engine
from mpiring.engine.operation import Operation
from mpiring.torch.eager import eager
from mpiring.torch.exceptions import HorovodInternalError, translated
from mpiring.torch.process_sets import engine


class _Kept(NamedTuple):
    """An operation, or those of a group, what runs them, and what makes the caller's result of the engine's."""

    engine: Engine
    operation: Operation | list[Operation]
    finish: Callable[[Any], Any]

    @property
    def operations(self) -> list[Operation]:
        """The operations."""
        return self.operation if isinstance(self.operation, list) else [self.operation]


_handle_map: dict[int, _Kept] = {}
"""What is on its way, or was not asked for yet; it keeps the tensors alive."""

_numbers = count()


def keep(operation: Operation | list[Operation], finish: Callable[[Any], Any]) -> int:
    """Return a number for an operation, or for several as one. synchronize will return what `finish` makes of the result."""
    number = next(_numbers)
    _handle_map[number] = _Kept(engine(), operation, finish)
    return number


@eager
def poll(handle: int) -> bool:
    """Tell whether an operation is over, so that synchronize does not wait; ValueError for one that is not known."""
    kept = _handle_map.get(handle)
    if kept is None:
        raise ValueError(f"handle {handle} is of no operation, or of one that was synchronized")
    with translated():
        return all([kept.engine.poll(operation) for operation in kept.operations])


@eager
def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; None where the handle is not known, or was synchronized.

    Raises HorovodInternalError, on every rank, where ranks disagree, one fails or is missing, or has shut down.
    """
    kept = _handle_map.get(handle)
    if kept is None:
        return None
    try:
        result = wait(kept.operation, kept.engine)
    finally:
        if all(operation.done for operation in kept.operations):        # else an interrupt, after which one may wait again
            _handle_map.pop(handle, None)
    return kept.finish(result)


def wait(operation: Operation | list[Operation], runs: Engine | None = None) -> Any:
    """Wait for an operation, or for all of a list, whatever goes wrong with some; return the result, or list of results."""
    runs = engine() if runs is None else runs
    if not isinstance(operation, list):
        with translated():
            return runs.synchronize(operation)
    results, errors = [], []
    for each in operation:
        try:
            results.append(wait(each, runs))
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
