"""In which exchanges the arrays of the operations that are ready go: small ones fused, large ones alone. Equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple

import numpy as np

from mpiring.engine.negotiation import Agreed
from mpiring.engine.operation import Description
from mpiring.runtime import ops

DIRECT = 1 << 20
"""Bytes from which on an array goes from its own memory: to copy it would take longer than an exchange of its own costs."""

FUSED = ("allreduce", "broadcast")


class Batch(NamedTuple):
    """One exchange: the arrays (entry, index), which are fused unless `direct`. The entry's description says what it is."""

    members: list[tuple[Agreed, int]]
    direct: bool


class Part(NamedTuple):
    """What an array of an operation can be fused with, None if with nothing; and its bytes."""

    group: tuple | None
    nbytes: int


def parts_of(description: Description, threshold: int) -> list[Part]:
    """Return how the arrays of an operation may be fused."""
    if description.kind not in FUSED:
        return [Part(None, 0)]
    parts = []
    for dtype, shape in zip(description.dtypes, description.shapes):
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        alone = nbytes > threshold or nbytes >= DIRECT or (description.op not in ops.NAMES and description.kind == "allreduce")
        group = (description.kind, description.device, *((dtype, description.op) if description.kind == "allreduce"
                                                         else (description.root,)))
        parts.append(Part(None if alone else group, nbytes))
    return parts


def batches(ready: Iterable[Agreed], parts: Callable[[Agreed], list[Part]], threshold: int) -> list[Batch]:
    """Return the exchanges, in the order in which all ranks make them."""
    found: list[Batch] = []
    filling: dict[tuple, tuple[Batch, int]] = {}
    for entry in ready:
        for index, (group, nbytes) in enumerate(parts(entry)):
            if group is None:
                found.append(Batch([(entry, index)], True))
                continue
            batch, used = filling.get(group, (None, 0))
            if batch is None or used + nbytes > threshold:
                batch, used = Batch([], False), 0
                found.append(batch)
            batch.members.append((entry, index))
            filling[group] = batch, used + nbytes
    return found
