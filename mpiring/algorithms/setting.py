"""What a schedule is made for: how many ranks, and what else some algorithms want to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple


class Ring(NamedTuple):
    """Ranks in the order in which a ring joins them, and its bandwidth as a whole number, relative to the other rings'."""

    order: tuple[int, ...]
    weight: int = 1


class Order(NamedTuple):
    """The rank at every place of a schedule, and the place of every rank."""

    ranks: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """`size` ranks and, for the algorithms that look at them, root, pieces, nodes and rings. Equal on all ranks.

    pieces: the chunks that a pipeline cuts the vector (double_tree: half the vector) into.
    nodes: the number of every rank's node; left out, all ranks share one.
    rings: for multi_ring, each through all ranks; left out, two rings over strides that have no divisor in common with `size`,
        counted node by node.

    Raises ValueError for a value that no schedule can be made for.
    """

    size: int
    root: int = 0
    pieces: int = 1
    nodes: tuple[int, ...] = ()
    rings: tuple[Ring, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size} is not a number of ranks")
        if not 0 <= self.root < self.size:
            raise ValueError(f"root {self.root} is not one of {self.size} ranks")
        if self.pieces < 1:
            raise ValueError(f"pieces {self.pieces} is not a number from 1 on")
        if len(self.nodes or range(self.size)) != self.size:
            raise ValueError(f"nodes has {len(self.nodes)} entries for {self.size} ranks")
        for ring in self.rings:
            if sorted(ring.order) != list(range(self.size)):
                raise ValueError(f"a ring through ranks {list(ring.order)} does not go through each of {self.size} once")
            if ring.weight < 1:
                raise ValueError(f"a ring's weight is {ring.weight}, not a number from 1 on")

    @cached_property
    def members(self) -> list[list[int]]:
        """The ranks of every node, in order of rank; nodes in the order of their first ranks."""
        found: dict[int, list[int]] = {}
        for rank in range(self.size):
            found.setdefault(self.nodes[rank] if self.nodes else 0, []).append(rank)
        return list(found.values())

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The number of every rank's node among `members`, and the rank's place there."""
        found = {rank: (node, place) for node, ranks in enumerate(self.members) for place, rank in enumerate(ranks)}
        return [found[rank] for rank in range(self.size)]

    @cached_property
    def lanes(self) -> int:
        """The ranks of the smallest node."""
        return min(map(len, self.members))

    @cached_property
    def largest(self) -> int:
        """The ranks of the largest node."""
        return max(map(len, self.members))

    @cached_property
    def by_node(self) -> list[int]:
        """All ranks, node by node: a ring in this order leaves every node once and enters it once."""
        return [rank for ranks in self.members for rank in ranks]

    @cached_property
    def turned(self) -> Order | None:
        """The ranks from the root on; None where the place of each is its number."""
        return _from(self.root, range(self.size))

    @cached_property
    def turned_by_node(self) -> Order | None:
        """The ranks node by node, from the root on; None where the place of each is its number."""
        return _from(self.root, self.by_node)

    @cached_property
    def all_rings(self) -> tuple[Ring, ...]:
        """The rings given, or two of equal weight, by node, that use different links where there are enough ranks."""
        if self.rings:
            return self.rings
        strides = [stride for stride in range(1, self.size // 2 + 1) if gcd(stride, self.size) == 1][:2] or [1]
        ways = strides if len(strides) > 1 else [1, -1]
        return tuple(Ring(tuple(self.by_node[stride * place % self.size] for place in range(self.size))) for stride in ways)


def _from(root: int, ranks: Sequence[int]) -> Order | None:
    """Return the order that begins at the root and goes on round the ranks."""
    start = ranks.index(root)
    order = *ranks[start:], *ranks[:start]
    if all(rank == place for place, rank in enumerate(order)):
        return None
    return Order(order, tuple(sorted(range(len(order)), key=order.__getitem__)))


def rings(orders: Sequence[Sequence[int]], weights: Sequence[int] | None = None) -> tuple[Ring, ...]:
    """Return rings through ranks in these orders, with these weights (left out: 1 each)."""
    if weights is not None and len(weights) != len(orders):
        raise ValueError(f"{len(weights)} weights for {len(orders)} rings")
    return tuple(Ring(tuple(order), weight) for order, weight in zip(orders, weights or [1] * len(orders)))
