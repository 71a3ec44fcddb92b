"""In which exchanges the arrays of the operations that are ready go: small ones fused, large ones alone. Equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import numpy as np

from mpiring.engine.negotiation import Slot
from mpiring.engine.operation import Description
from mpiring.runtime import ops

DIRECT = 1 << 20
"""Bytes from which on an array goes from its own memory: to copy it would take longer than an exchange of its own costs."""

FUSED = ("allreduce", "broadcast")


class Batch:
    """One exchange: arrays (slot, index), which are fused unless `direct`, in a burst that is made when it is needed first."""

    def __init__(self, direct: bool):
        self.members: list[tuple[Slot, int]] = []
        self.direct, self.burst = direct, None

    @property
    def description(self) -> Description:
        """What it is, from the first of its operations; what is fused agrees in all that matters."""
        return self.members[0][0].description


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
        alike = (dtype, description.op) if description.kind == "allreduce" else (description.root,)
        group = description.kind, description.device, *alike
        parts.append(Part(None if alone else group, nbytes))
    return parts


def batches(ready: Iterable[Slot], threshold: int) -> list[Batch]:
    """Return the exchanges, in the order in which all ranks make them."""
    found: list[Batch] = []
    filling: dict[tuple, tuple[Batch, int]] = {}
    for slot in ready:
        for index, (group, nbytes) in enumerate(parts_of(slot.description, threshold)):
            batch, used = filling.get(group, (None, 0))
            if group is None or batch is None or used + nbytes > threshold:
                batch, used = Batch(group is None), 0
                found.append(batch)
            batch.members.append((slot, index))
            if group is not None:
                filling[group] = batch, used + nbytes
    return found
