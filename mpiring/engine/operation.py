"""One operation that a caller has submitted: what it is, as all ranks must say alike, and its arrays, which are this rank's own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST, Space

SHOWN = 6
"""Arrays of a group that a message describes."""

SEAL = "seal"
"""The kind of what only rank 0 submits: word that a fixed group has its members."""


class Description(NamedTuple):
    """What ranks must agree about. shapes: of each array; the first dimension is None where it may differ between ranks."""

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int | None, ...], ...] = ()
    op: str = ""
    root: int | None = None
    prescale: float = 1.0
    postscale: float = 1.0
    device: bool = False

    def __str__(self) -> str:
        words = [self.kind.replace("_", " ")]
        if len(self.shapes) == 1:
            words.append(f"of {self.array(0)}")
        elif self.shapes:
            some = ", ".join(self.array(index) for index in range(min(SHOWN, len(self.shapes))))
            words.append(f"of {len(self.shapes)} arrays ({some}{', ...' if len(self.shapes) > SHOWN else ''})")
        words += ["on a GPU"] if self.device else []
        words += [f"by {self.op}"] if self.op else []
        words += [f"from root {self.root}"] if self.root is not None else []
        words += [f"prescale {self.prescale!r}"] if self.prescale != 1 else []
        words += [f"postscale {self.postscale!r}"] if self.postscale != 1 else []
        return " ".join(words)

    @property
    def for_absent(self) -> bool:
        """Whether it can go on without the data of ranks that have joined: they must know the op."""
        return self.kind == SEAL or (self.kind == "allreduce" and self.op in ops.ENGINE_NAMES)

    def array(self, index: int) -> str:
        """Write dtype and shape of one array: float32 (3, 4)."""
        lengths = ["*" if length is None else str(length) for length in self.shapes[index]]
        return f"{self.dtypes[index]} ({', '.join(lengths)}{',' if len(lengths) == 1 else ''})"


def dtype_of(name: str) -> np.dtype:
    """Return the dtype that a description names; on a rank that has joined it may be one of ml_dtypes that was never seen here."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(import_module("ml_dtypes"), name))


def shown(key: Hashable) -> str:
    """Write an operation's key as messages name it."""
    return repr(key) if isinstance(key, str) else f"unnamed operation {key}"


class Operation:
    """An operation on its way; callers know it as a handle.

    key: the name, or a number for one without. arrays, outs: what goes in, and where the results go; an out is None where it is
    made late, for its shape is not known yet. result: what synchronize returns. left: arrays that are not through yet. done is set
    last of all.
    """

    # In slots, so that it is one small object; what most operations never set is left to a dict that these do not have.
    __slots__ = ("__dict__", "__weakref__", "arrays", "description", "done", "error", "key", "left", "loop", "nbytes", "op", "outs",
                 "result", "submitted")
    space: Space = HOST
    stream: Any = None
    rows: list[int] | None = None
    splits = given_up = drawn = False
    agreed = reported = 0.0

    def __init__(self, description: Description, op: Any, arrays: Sequence[Any], outs: Sequence[Any], result: Any, nbytes: int):
        self.description, self.op, self.arrays, self.outs, self.result = description, op, arrays, outs, result
        self.nbytes, self.left, self.submitted = nbytes, len(arrays) or 1, perf_counter()
        self.key: Any = None
        self.loop: Any = None
        self.error: BaseException | None = None
        self.done = False

    def give_up(self, error: BaseException) -> None:
        """Leave its caller, but not the ranks that may still come: they get what it had to give."""
        self.error, self.given_up = error, True
        self.arrays = [array.copy() for array in self.arrays]
        self.outs = [None if out is None else out.copy() for out in self.outs]

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "under way"
        return f"<{self.description.kind} {shown(self.key)}: {state}>"
