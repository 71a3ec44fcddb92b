"""One operation that a caller has submitted: what it is, as all ranks must say alike, and its arrays, which are this rank's own."""

from __future__ import annotations

from collections.abc import Hashable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from mpiring.runtime.arrays import Space
from mpiring.runtime.ops import Operation as Op


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
            words.append(f"of {len(self.shapes)} arrays ({', '.join(self.array(index) for index in range(len(self.shapes)))})")
        words += ["on a GPU"] if self.device else []
        words += [f"by {self.op}"] if self.op else []
        words += [f"from root {self.root}"] if self.root is not None else []
        words += [f"prescale {self.prescale!r}"] if self.prescale != 1 else []
        words += [f"postscale {self.postscale!r}"] if self.postscale != 1 else []
        return " ".join(words)

    def array(self, index: int) -> str:
        """Write dtype and shape of one array: float32 (3, 4)."""
        lengths = ["*" if length is None else str(length) for length in self.shapes[index]]
        return f"{self.dtypes[index]} ({', '.join(lengths)}{',' if len(lengths) == 1 else ''})"


def shown(key: Hashable) -> str:
    """Write an operation's key as messages name it."""
    return repr(key) if isinstance(key, str) else f"unnamed operation {key}"


class Operation:
    """An operation on its way; callers know it as a handle.

    key: the name, or a number for one without. parts: (array, out) of each array; out is None where it is made late, for its
    shape is not known yet. done is set last of all.
    """

    __slots__ = (
        "__weakref__",
        "agreed",
        "description",
        "done",
        "error",
        "given_up",
        "key",
        "left",
        "loop",
        "op",
        "parts",
        "reported",
        "result",
        "root",
        "rows",
        "single",
        "space",
        "splits",
        "stream",
        "submitted",
    )

    def __init__(self, description: Description, op: Op | None, parts: list[tuple[Any, Any]], space: Space, key: Any = None,
                 root: int = 0, splits: list[int] | None = None, single: bool = True):
        self.key, self.description, self.op, self.parts, self.space = key, description, op, parts, space
        self.root, self.splits, self.single = root, splits, single
        self.stream = space.stream()
        self.left = len(parts)                           # arrays that are not through yet
        self.done, self.error, self.result = False, None, None
        self.submitted, self.agreed = perf_counter(), 0.0
        self.given_up = self.reported = False

    @property
    def name(self) -> str:
        """The name in messages."""
        return shown(self.key)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays on this rank."""
        return sum(array.nbytes for array, _ in self.parts)

    def finish(self) -> None:
        """Take what has been written as the result; nobody is told yet."""
        if self.result is None and self.error is None:
            outs = [out for _, out in self.parts]
            self.result = outs[0] if self.single and outs else outs if outs else None

    def give_up(self, error: BaseException) -> None:
        """Leave its caller, but not the ranks that may still come: they get what it had to give."""
        self.error, self.given_up = error, True
        self.parts = [(array.copy(), None if out is None else self._spare(out)) for array, out in self.parts]

    def _spare(self, out: Any) -> Any:
        return np.empty(out.shape, out.dtype) if isinstance(out, np.ndarray) else out.copy()

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.done else "under way"
        return f"<{self.description.kind} {self.name}: {state}>"
