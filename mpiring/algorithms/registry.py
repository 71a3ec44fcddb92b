"""Every algorithm by collective and name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

from mpiring.algorithms import (
    bidirectional_ring,
    bruck,
    double_tree,
    hierarchical,
    multi_ring,
    pairwise,
    pipelined_tree,
    rabenseifner,
    recursive_doubling,
    reduce_scatter_gather,
    ring,
    scatter_allgather,
    tree,
)
from mpiring.algorithms.costs import Cost
from mpiring.algorithms.setting import Order, Ring, Setting
from mpiring.algorithms.step import NONE, Step, floor_log2, one
from mpiring.algorithms.weave import among, on_chunks, put


@dataclass(frozen=True)
class Collective:
    """What a collective is: the chunks that a rank brings, and those that it is to have in the end.

    Both are functions (rank, setting, chunks) -> range. Where several ranks bring the same chunk, its result is their reduction.
    """

    name: str
    given: Callable[[int, Setting, int], range]
    wanted: Callable[[int, Setting, int], range]
    reduces: bool
    rooted: bool = False

    @property
    def scattered(self) -> bool:
        """Whether chunk r is rank r's own, before or after."""
        return _own in (self.given, self.wanted)

    def vector(self, setting: Setting, chunks: int) -> int:
        """Return how many chunks make up the longest buffer of a rank: what `sent` of an algorithm counts in."""
        return max(len(which(0, setting, chunks)) for which in (self.given, self.wanted))


def _all(rank: int, setting: Setting, chunks: int) -> range:
    return range(chunks)


def _own(rank: int, setting: Setting, chunks: int) -> range:
    return one(rank)


def _at_root(rank: int, setting: Setting, chunks: int) -> range:
    return range(chunks) if rank == setting.root else NONE


def _row(rank: int, setting: Setting, chunks: int) -> range:
    return range(rank * setting.size, (rank + 1) * setting.size)


def _column(rank: int, setting: Setting, chunks: int) -> range:
    return range(rank, chunks, setting.size)


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", given=_all, wanted=_all, reduces=True),
        Collective("reduce_scatter", given=_all, wanted=_own, reduces=True),
        Collective("allgather", given=_own, wanted=_all, reduces=False),
        Collective("broadcast", given=_at_root, wanted=_all, reduces=False, rooted=True),
        Collective("reduce", given=_all, wanted=_at_root, reduces=True, rooted=True),
        Collective("alltoall", given=_row, wanted=_column, reduces=False),
    )
}


def _whole(setting: Setting) -> int:
    return 1


@dataclass(frozen=True)
class Algorithm:
    """A schedule for a collective, the number of chunks it works on, and its two cost lines.

    collective: a Collective, or the name of one: "allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall".
    schedule: (rank, size, *needs) -> the rank's Steps, one in every round: IDLE where it has nothing to do. A message is sent and
        received in the same round.
    chunks: (setting) -> the number of chunks that the vector is cut into, with ids from 0 on (for alltoall: those of all ranks
        together, src * size + dst); left out: one.
    rounds, sent: (setting) -> the steps of every rank, and what the busiest rank sends, in vectors; left out: counted.
    use: what it is for.
    needs: names of Setting's attributes that the schedule takes. One that does not take the root is made for root 0.
    pieces: (size, bytes, latency in bytes) -> the best number of pieces, for a pipeline.
    cyclic: rank r's schedule is rank 0's with r added to every peer and chunk, modulo n (chunks in blocks of n).
    by_node: the schedule's ranks are places in an order that follows nodes: the ranks of the first node, of the second, and so on.
        For one that talks most to its neighbours and need not keep the order of ranks.

    Raises ValueError for an unknown collective, or for `by_node` where the schedule takes what tells it the ranks themselves.
    """

    name: str
    collective: Collective | str
    schedule: Callable[..., Iterable[Step]]
    chunks: Callable[[Setting], int] = _whole
    rounds: Callable[[Setting], object] | None = None
    sent: Callable[[Setting], object] | None = None
    use: str = ""
    needs: tuple[str, ...] = ()
    pieces: Callable[[int, int, float], int] | None = None
    cyclic: bool = False
    by_node: bool = False

    def __post_init__(self) -> None:
        if self.by_node and (told := sorted(set(self.needs) - {"pieces"})):
            raise ValueError(f"algorithm {self.name!r} is by_node, so its schedule knows places, not ranks: it cannot need {told}")
        if isinstance(self.collective, str):
            if self.collective not in COLLECTIVES:
                raise ValueError(unknown("collective", self.collective, COLLECTIVES))
            object.__setattr__(self, "collective", COLLECTIVES[self.collective])
        for name, default in (("rounds", self._count_rounds), ("sent", self._count_sent)):
            current = getattr(self, name)
            if current is None or isinstance(getattr(current, "__self__", None), Algorithm):     # replace() copies another's
                object.__setattr__(self, name, default)

    def _count_rounds(self, setting: Setting) -> int:
        return sum(1 for _ in self.steps(setting.root, setting))

    def _count_sent(self, setting: Setting) -> Fraction:
        most = max(sum(len(step.send) for step in self.steps(rank, setting)) for rank in range(setting.size))
        return Fraction(most, self.collective.vector(setting, self.chunks(setting)))

    def order(self, setting: Setting) -> Order | None:
        """Return which rank has which place of the schedule; None where the place of each is its number."""
        if "root" in self.needs:
            return None
        return setting.turned_by_node if self.by_node else setting.turned

    def turns(self, setting: Setting) -> bool:
        """Tell whether rank r's steps are rank 0's with r added: not where other ranks than r have the places r."""
        return self.cyclic and self.order(setting) is None

    def steps(self, rank: int, setting: Setting) -> Iterator[Step]:
        """Yield one rank's steps."""
        order = self.order(setting)
        steps = self.schedule(order.places[rank] if order else rank, setting.size, *(getattr(setting, need) for need in self.needs))
        if order is None:
            return iter(steps)
        return among(order.ranks, on_chunks(put(order.ranks), steps) if self.collective.scattered else steps)


def _per_rank(setting: Setting) -> int:
    return setting.size


def _per_piece(setting: Setting) -> int:
    return setting.pieces


def _per_pair(setting: Setting) -> int:
    return setting.size**2


def _entries(collective: str, *entries: tuple) -> Iterator[Algorithm]:
    """Yield algorithms for a collective from name, schedule, chunks, cost lines, use and what else there is."""
    for name, schedule, chunks, rounds, sent, use, *more in entries:
        yield Algorithm(name, COLLECTIVES[collective], schedule, chunks, Cost(rounds), Cost(sent), use, **(more[0] if more else {}))


FEWEST = "short and medium vectors: the fewest steps, the fewest bytes"
RING = {"cyclic": True, "by_node": True}
PIPELINE = {"needs": ("pieces",), "pieces": pipelined_tree.best_pieces}

ALGORITHMS = {
    (algorithm.collective.name, algorithm.name): algorithm
    for algorithm in (
        *_entries(
            "allreduce",
            ("ring", ring.allreduce, _per_rank, "2*(n-1)", "2*(n-1)/n", "long vectors: the fewest bytes, neighbours only",
             RING),
            ("tree", tree.allreduce, _whole, "2*log", "log", "the baseline; keeps the order of ranks"),
            ("recursive_doubling", recursive_doubling.allreduce, _whole, "lg + 2*f", "lg + f", "short vectors: the fewest steps"),
            ("rabenseifner", rabenseifner.allreduce, lambda setting: 1 << floor_log2(setting.size), "2*lg + 2*f",
             "2*(p-1)/p + f", "medium and long vectors, powers of two: few steps, few bytes"),
            ("bruck", bruck.allreduce, _per_rank, "2*log", "2*(n-1)/n",
             "medium and long vectors, any number of ranks: few steps, the fewest bytes", {"cyclic": True}),
            ("pipelined_tree", pipelined_tree.allreduce, _per_piece, "4*(h+k)", "min(3, n-1)",
             "medium vectors on many ranks; keeps the order of ranks", PIPELINE),
            ("double_tree", double_tree.allreduce, lambda setting: 2 * setting.pieces, "4*(h+k)", "min(4, n)/2",
             "long vectors on very many ranks: few bytes in steps that grow with log n",
             {"needs": ("pieces",), "pieces": double_tree.best_pieces}),
            ("bidirectional_ring", bidirectional_ring.allreduce, lambda setting: 2 * setting.size, "4*(n-1)", "2*(n-1)/n",
             "long vectors where each neighbour has a link of its own, usable both ways", RING),
            ("multi_ring", multi_ring.allreduce, lambda setting: setting.size * sum(ring.weight for ring in setting.all_rings),
             "2*(n-1)*r", "2*(n-1)/n", "long vectors on a machine whose links make several rings", {"needs": ("all_rings",)}),
            ("hierarchical", hierarchical.allreduce, lambda setting: setting.lanes * len(setting.members),
             "2*(M-1) + 2*(H-1)", "2*(n-1)/n", "several ranks on each of several nodes: each link between nodes carries least",
             {"needs": ("members", "places", "lanes", "largest")}),
        ),
        *_entries(
            "reduce_scatter",
            ("ring", ring.reduce_scatter, _per_rank, "n-1", "(n-1)/n", "long vectors, neighbours only", RING),
            ("bruck", bruck.reduce_scatter, _per_rank, "log", "(n-1)/n", FEWEST, {"cyclic": True}),
        ),
        *_entries(
            "allgather",
            ("ring", ring.allgather, _per_rank, "n-1", "(n-1)/n", "long vectors, neighbours only", RING),
            ("bruck", bruck.allgather, _per_rank, "log", "(n-1)/n", FEWEST, {"cyclic": True}),
        ),
        *_entries(
            "broadcast",
            ("tree", tree.broadcast, _whole, "log", "log", "short vectors: the fewest steps", {"needs": ("root",)}),
            ("pipelined_tree", pipelined_tree.broadcast, _per_piece, "2*(h+k)", "min(2, n//2)",
             "medium and long vectors on many ranks", PIPELINE),
            ("scatter_allgather", scatter_allgather.broadcast, _per_rank, "log + n - 1", "2*(n-1)/n", "long vectors on few ranks",
             {"by_node": True}),
        ),
        *_entries(
            "reduce",
            ("tree", tree.reduce, _whole, "log", "1", "short vectors: the fewest steps; keeps the order of ranks",
             {"needs": ("root",)}),
            ("pipelined_tree", pipelined_tree.reduce, _per_piece, "2*(h+k)", "1",
             "medium and long vectors on many ranks; keeps the order of ranks for root 0", PIPELINE),
            ("reduce_scatter_gather", reduce_scatter_gather.reduce, _per_rank, "n - 1 + log", "(n-1+s)/n",
             "long vectors on few ranks", {"by_node": True}),
        ),
        *_entries(
            "alltoall",
            ("pairwise", pairwise.alltoall, _per_pair, "n - 1 + n%2", "(n-1)/n", "long blocks: the fewest bytes"),
            ("bruck", bruck.alltoall, _per_pair, "log", "b/n", "short blocks: the fewest steps"),
        ),
    )
}


def multi_ring_over(rings: Iterable[tuple[Sequence[int], int]]) -> Algorithm:
    """Return multi_ring over rings of your own, each an order of all ranks and a weight: (order, weight), (order, weight), ...

    Make it once and pass it to every call: each one made is proven, and plans are kept, for itself. ValueError where a ring
    does not go through each rank once.
    """
    chosen = tuple(Ring(tuple(order), weight) for order, weight in rings)
    if not chosen:
        raise ValueError("there is no ring")
    Setting(len(chosen[0].order), rings=chosen)          # says what is wrong

    def schedule(rank: int, size: int) -> Iterator[Step]:
        if size != len(chosen[0].order):
            raise ValueError(f"the rings go through {len(chosen[0].order)} ranks, not {size}")
        return multi_ring.allreduce(rank, size, chosen)

    return Algorithm("multi_ring", "allreduce", schedule, lambda setting: setting.size * sum(ring.weight for ring in chosen))


def names(collective: str) -> list[str]:
    """List the algorithms that the registry has for a collective."""
    return [name for owner, name in ALGORITHMS if owner == collective]


def find(name: str, collective: str = "allreduce") -> Algorithm:
    """Return an algorithm by name; ValueError names the nearest one and lists all."""
    if collective not in COLLECTIVES:
        raise ValueError(unknown("collective", collective, COLLECTIVES))
    if (collective, name) not in ALGORITHMS:
        raise ValueError(unknown("algorithm", name, names(collective), f" for {collective}"))
    return ALGORITHMS[collective, name]


def unknown(kind: str, name: str, known: Iterable[str], what_for: str = "") -> str:
    """Say that a name is not known, which known one is nearest, and list all."""
    known = list(known)
    near = get_close_matches(name, known, 1, 0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {name!r}{what_for}{hint}; known: {', '.join(known)}"
