"""The rounds of a schedule as arrays over the ranks: what the price of very many ranks is worked out from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import ALGORITHMS, Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import Chunks
from mpiring.analysis.replay import replay

NOBODY = -1


class Span(NamedTuple):
    """The least and the greatest chunk of each rank's message (0 and -1: none).

    only: rank 0's chunk, where each rank has one, and rank r's is rank 0's moved by r.
    """

    low: np.ndarray
    high: np.ndarray
    only: int | None = None


class Who(NamedTuple):
    """Who sends to whom, and who receives from whom; NOBODY for no one. Of one object for rounds that do not differ in it."""

    to: np.ndarray
    source: np.ndarray


class Round(NamedTuple):
    """What all ranks do in a round. An entry for every rank."""

    who: Who
    send: Span
    recv: Span
    nbytes: np.ndarray
    reduce: np.ndarray | bool


def rounds_of(algorithm: Algorithm, setting: Setting, total: int) -> Iterator[Round]:
    """Yield the rounds of a vector of `total` bytes, from as little of the schedule as they can be made of."""
    if setting.size == 1:
        return
    sizes = np.array(counts(total, algorithm.chunks(setting)))
    if algorithm.turns(setting):
        yield from _turned(algorithm, setting, sizes)
        return
    known = ALGORITHMS.get((algorithm.collective.name, algorithm.name)) is algorithm
    edges = np.array([0, *np.cumsum(sizes)])
    for who, send, recv, reduce, odd in _flow(algorithm, setting) if known and algorithm.pieces else _plain(algorithm, setting):
        nbytes = edges[send.high + 1] - edges[send.low]
        for rank, chunks in odd:
            nbytes[rank] = sizes[list(chunks)].sum()
        yield Round(who, send, recv, nbytes, reduce)


# ---- rounds of a cyclic schedule: rank 0's, turned

def _turned(algorithm: Algorithm, setting: Setting, sizes: np.ndarray) -> Iterator[Round]:
    """Yield rounds made of rank 0's steps alone: rank r's are those with r added to every rank and chunk."""
    size = setting.size
    turn = _Turn(size, sizes)
    ways: dict[tuple[int, int], Who] = {}
    nobody = Who(*np.full((2, size), NOBODY))
    none = Span(np.zeros(size, int), np.full(size, -1))
    for to, send, source, recv, reduce in algorithm.steps(0, setting):
        if to is None or source is None:                 # rank 0 does not send: nobody does, and nobody receives
            yield Round(nobody, none, none, none.low, False)
            continue
        if (to, source) not in ways:
            ways[to, source] = Who((to + np.arange(size)) % size, (source + np.arange(size)) % size)
        yield Round(ways[to, source], turn.span(send), turn.span(recv), turn.nbytes(send), reduce)


class _Turn:
    """Rank 0's chunks moved by every rank's number, inside their block of n."""

    def __init__(self, size: int, sizes: np.ndarray):
        self.size = size
        blocks = sizes.reshape(-1, size)
        self.ids = np.concatenate([np.arange(len(sizes)).reshape(-1, size)] * 2, axis=1)     # twice, so that a turn is a slice
        self.sizes = np.concatenate([blocks] * 2, axis=1)
        self.edges = np.concatenate([np.zeros((len(blocks), 1), int), np.cumsum(self.sizes, axis=1)], axis=1)

    def span(self, chunks: Chunks) -> Span:
        block, place, count = self._run(chunks)
        if not count:
            ids = self._all(chunks)
            return Span(ids.min(axis=0), ids.max(axis=0))
        low = self.ids[block, place:place + self.size]
        if count == 1:
            return Span(low, low, chunks[0])
        first, high = block * self.size, low + count - 1
        wraps = high >= first + self.size
        return Span(np.where(wraps, first, low), np.where(wraps, first + self.size - 1, high))

    def nbytes(self, chunks: Chunks) -> np.ndarray:
        block, place, count = self._run(chunks)
        if count == 1:
            return self.sizes[block, place:place + self.size]
        if count:
            return self.edges[block, place + count:place + count + self.size] - self.edges[block, place:place + self.size]
        return self.sizes.reshape(-1)[self._twice(self._all(chunks))].sum(axis=0)

    def _run(self, chunks: Chunks) -> tuple[int, int, int]:
        """Return the block, the first chunk's place in it and the number of chunks, or 0 where they do not follow one another."""
        block, place = divmod(chunks[0], self.size)
        for index, chunk in enumerate(chunks if len(chunks) > 1 else ()):
            if chunk // self.size != block or chunk % self.size != (place + index) % self.size:
                return block, place, 0
        return block, place, len(chunks)

    def _all(self, chunks: Chunks) -> np.ndarray:
        block, place = np.divmod(np.array(chunks)[:, None], self.size)
        return block * self.size + (place + np.arange(self.size)) % self.size

    def _twice(self, ids: np.ndarray) -> np.ndarray:
        return ids // self.size * 2 * self.size + ids % self.size


# ---- rounds of any schedule

Packed = tuple[Who, Span, Span, np.ndarray, list[tuple[int, Chunks]]]
"""A round without bytes; the last entry are ranks that send chunks which are not a range, and those chunks."""


def _plain(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    """Yield the rounds as arrays; those of few ranks are kept, for they are asked for again and again."""
    return iter(_kept(algorithm, setting)) if setting.size <= FEW else _packed(algorithm, setting)


FEW = 64


@lru_cache(maxsize=64)
def _kept(algorithm: Algorithm, setting: Setting) -> list[Packed]:
    return list(_packed(algorithm, setting))


def _packed(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    known: dict[bytes, Who] = {}
    for steps in replay(algorithm, setting):
        to, send, source, recv, reduce = zip(*steps)
        who = _who(known, *(np.array([NOBODY if peer is None else peer for peer in peers]) for peers in (to, source)))
        odd = [(rank, chunks) for rank, chunks in enumerate(send) if type(chunks) is not range or chunks.step != 1]
        yield who, _span(send), _span(recv), np.array(reduce), odd


def _who(known: dict[bytes, Who], to: np.ndarray, source: np.ndarray) -> Who:
    """Return the same object for the same ranks, so that their links are looked up once; forget all when there are many."""
    if len(known) > 32:
        known.clear()
    return known.setdefault(to.tobytes(), Who(to, source))


def _span(sets: tuple[Chunks, ...]) -> Span:
    return Span(np.array([min(chunks, default=0) if type(chunks) is tuple else chunks[0] if chunks else 0 for chunks in sets]),
                np.array([max(chunks, default=-1) if type(chunks) is tuple else chunks[-1] if chunks else -1 for chunks in sets]))


# ---- rounds of a pipeline: those of one piece, spread

def _flow(algorithm: Algorithm, setting: Setting) -> Iterator[Packed]:
    """Yield a pipeline's rounds, made of its schedule for one piece: further pieces follow two rounds behind each other.

    Sums count rounds from the start and copies from the end, for a broadcast is a reduction backwards. On very many ranks this
    is what makes the price affordable; the tests hold it against the schedules themselves.
    """
    pieces = setting.pieces
    single = list(_plain(algorithm, Setting(setting.size, setting.root, 1, setting.nodes, setting.rings)))
    length = int(algorithm.rounds(setting))
    sums = [_messages(who, send, reduce, True) for who, send, _, reduce, _ in single]
    copies = [_messages(who, send, reduce, False) for who, send, _, reduce, _ in reversed(single)]
    known: dict[bytes, Who] = {}
    for turn in range(length):
        parts = [*_under_way(sums, turn, pieces), *_under_way(copies, length - 1 - turn, pieces)]
        sender, receiver, chunk, adds = (np.concatenate(part) for part in zip(*parts)) if parts else [np.zeros(0, int)] * 4
        yield _scattered(known, setting.size, sender, receiver, chunk, adds.astype(bool))


Messages = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Senders, receivers, chunks, and whether they are summed."""


def _messages(who: Who, send: Span, reduce: np.ndarray, sums: bool) -> Messages:
    senders = np.flatnonzero((who.to != NOBODY) & (reduce[who.to] == sums))
    return senders, who.to[senders], send.low[senders], np.full(len(senders), sums)


def _under_way(single: list[Messages], turn: int, pieces: int) -> Iterator[Messages]:
    """Yield the messages of a round: those that the schedule for one piece has an even number of rounds before."""
    for first in range(turn % 2, min(turn + 1, len(single)), 2):
        piece = (turn - first) // 2
        senders, receivers, trees, sums = single[first]
        if piece < pieces and len(senders):
            yield senders, receivers, trees * pieces + piece, sums


def _scattered(known: dict[bytes, Who], size: int, sender: np.ndarray, receiver: np.ndarray, chunk: np.ndarray,
               sums: np.ndarray) -> Packed:
    to, source = np.full(size, NOBODY), np.full(size, NOBODY)
    sent, got = (Span(np.zeros(size, int), np.full(size, -1)) for _ in range(2))
    to[sender], source[receiver] = receiver, sender
    sent.low[sender] = sent.high[sender] = chunk
    got.low[receiver] = got.high[receiver] = chunk
    reduce = np.zeros(size, bool)
    reduce[receiver] = sums
    return _who(known, to, source), sent, got, reduce, []
