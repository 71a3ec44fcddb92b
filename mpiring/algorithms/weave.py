"""Schedules made of schedules: the same steps among other ranks and on other chunks, and several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat, zip_longest

from mpiring.algorithms.step import IDLE, NONE, Chunks, Step, one


def among(ranks: Sequence[int], steps: Iterable[Step]) -> Iterator[Step]:
    """Let the steps of place p of a smaller or other order of ranks be those of rank ranks[p]."""
    for send_to, send, recv_from, recv, reduce in steps:
        yield Step(None if send_to is None else ranks[send_to], send, None if recv_from is None else ranks[recv_from], recv, reduce)


def on_chunks(where: Callable[[Chunks], Chunks], steps: Iterable[Step]) -> Iterator[Step]:
    """Let steps work on the chunks that `where` gives for theirs; a message for which it gives none is not sent."""
    for send_to, send, recv_from, recv, reduce in steps:
        send = NONE if send_to is None else where(send)
        recv = NONE if recv_from is None else where(recv)
        yield Step(send_to if send else None, send, recv_from if recv else None, recv, reduce and bool(recv))


def spread(base: int, width: int = 1) -> Callable[[range], range]:
    """Return the function that puts `width` chunks in the place of each, the first ones at `base`."""
    return lambda chunks: range(base + chunks.start * width, base + chunks.stop * width)


def put(ids: Sequence[int]) -> Callable[[Chunks], Chunks]:
    """Return the function that puts chunk ids[c] in the place of chunk c."""
    return lambda chunks: one(ids[chunks[0]]) if len(chunks) == 1 else tuple(ids[chunk] for chunk in chunks)


def beside(*schedules: Iterable[Step]) -> Iterator[Step]:
    """Take one step of each schedule in turn."""
    return chain.from_iterable(zip_longest(*schedules, fillvalue=IDLE))


def padded(rounds: int, steps: Iterable[Step]) -> Iterator[Step]:
    """Stay idle behind the steps until `rounds` are over."""
    return islice(chain(steps, repeat(IDLE)), rounds)
