"""In which exchanges the arrays of the operations that are ready go: fused, as one vector, or alone. Equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from mpiring.engine.negotiation import Slot
from mpiring.engine.operation import Description, dtype_of
from mpiring.runtime import ops
from mpiring.runtime.halves import is_narrow

DIRECT = 1 << 20
"""Bytes from which on an array goes from its own memory: to copy it would take longer than an exchange of its own costs."""

FUSED = ("allreduce", "broadcast")

ALONE, BURST, VECTOR = "alone", "burst", "vector"

Member = tuple[Slot, int]
"""An array: its operation's slot, and which one it is there."""


class Batch:
    """One exchange of arrays (slot, index): alone, fused into a burst, or as one vector, `instead` of which others can serve.

    burst: what was made for it when it was needed first.
    """

    def __init__(self, way: str, members: list[Member] | None = None):
        self.way, self.members, self.burst = way, members or [], None
        self.instead: list[Batch] = []

    @property
    def description(self) -> Description:
        """What it is, from the first of its operations; what goes together agrees in all that matters."""
        return self.members[0][0].description


class Part(NamedTuple):
    """What an array of an operation can be fused with, and with what it can be one vector, None if with nothing; and its bytes."""

    group: tuple | None
    vector: tuple | None
    nbytes: int


def parts_of(description: Description, threshold: int) -> list[Part]:
    """Return how the arrays of an operation may go together."""
    if description.kind not in FUSED:
        return [Part(None, None, 0)]
    reduces = description.kind == "allreduce"
    known = not reduces or description.op in ops.ENGINE_NAMES
    parts = []
    for name, shape in zip(description.dtypes, description.shapes):
        dtype = dtype_of(name)
        nbytes = prod(shape) * dtype.itemsize
        alike = (name, description.op) if reduces else (description.root,)
        group = (description.kind, description.device, *alike) if known and nbytes <= threshold and nbytes < DIRECT else None
        plain = description.op in ops.NAMES and not description.device and description.prescale == description.postscale == 1
        parts.append(Part(group, alike if plain and nbytes and not is_narrow(dtype) else None, nbytes))
    return parts


def batches(ready: Iterable[Slot], threshold: int, vectors_from: int | None = None) -> list[Batch]:
    """Return the exchanges, in the order in which all ranks make them.

    vectors_from: bytes from which arrays that are alike are one vector; None: never.
    """
    parts = []
    for slot in ready:
        if slot.parts is None:
            slot.parts = parts_of(slot.description, threshold)
        parts += [((slot, index), part) for index, part in enumerate(slot.parts)]
    vectors: dict[tuple, list[tuple[Member, Part]]] = {}
    if vectors_from is not None:
        for member, part in parts:
            vectors.setdefault(part.vector, []).append((member, part))
    long = {key for key, found in vectors.items() if key and sum(part.nbytes for _, part in found) >= vectors_from}
    together = []
    for key in vectors:
        if key in long:
            batch = Batch(VECTOR, [member for member, _ in vectors[key]])
            batch.instead = _fused(vectors[key], threshold)
            together.append(batch)
    return together + _fused([(member, part) for member, part in parts if part.vector not in long], threshold)


def _fused(parts: Iterable[tuple[Member, Part]], threshold: int) -> list[Batch]:
    found: list[Batch] = []
    filling: dict[tuple, tuple[Batch, int]] = {}
    for member, (group, _, nbytes) in parts:
        if group is None:
            found.append(Batch(ALONE, [member]))
            continue
        batch, used = filling.get(group, (None, 0))
        if batch is None or used + nbytes > threshold:
            batch, used = Batch(BURST), 0
            found.append(batch)
        batch.members.append(member)
        filling[group] = batch, used + nbytes
    return found
