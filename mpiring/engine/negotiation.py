"""What all ranks are ready for: names they have met before are agreed by a bit each, new ones are described once. No MPI here.

Every rank keeps the same list of slots, one for a name, and knows of each what every rank said last that it is. A round:

1. compose: each rank gives a bit for every slot, whether it has submitted that, and its news: names without a slot, and
   operations that are not what it said last.
2. The bits of all ranks are combined by AND; where somebody has news, all ranks' news are gathered.
3. agree: from these, which are the same on all ranks, each rank works out what is ready, what is at odds, and the new slots.

So no rank leads. To know what nobody has submitted (such slots can be forgotten) the bits travel inverted as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from mpiring.engine.operation import SEAL, Description, Operation, shown
from mpiring.errors import MismatchError

CAPACITY = 16384
"""Slots that are kept, at least; the least recently used go when there are more and nobody waits for them."""

NO_NEWS, NEWS = 0xFF, 0xFE

JOIN, SHUTDOWN = ("join",), ("shutdown",)
"""News that are about a rank, not an operation."""

News = list[tuple[Hashable, Any]]


class Slot:
    """A name, and what each rank said last that it is.

    description: what all say. alike: whether they do. signature: a number that changes with what they say, and is no other slot's.
    used: the round in which it was ready last. operation, error: of this rank, when it is ready; the operation is None on a rank
    that has joined.
    """

    __slots__ = ("alike", "description", "error", "key", "of", "operation", "signature", "used")

    def __init__(self, key: Hashable, description: Description, size: int):
        self.key, self.of, self.description, self.alike = key, [description] * size, description, True
        self.signature = self.used = 0
        self.operation: Operation | None = None
        self.error: MismatchError | None = None

    def say(self, rank: int, description: Description, signature: int) -> None:
        """Take note of what a rank says that this is."""
        self.of[rank], self.signature = description, signature
        self.description = self.of[0]
        self.alike = all(what == description for what in self.of)


class Outcome(NamedTuple):
    """What a round has brought, equal on all ranks but for their own operations.

    ready: what all ranks have submitted, in the order of slots. leaving: ranks that shut the engine down. last: who joined last, if
    all have by now; met: unnamed operations until then.
    """

    ready: list[Slot]
    leaving: list[int]
    last: int | None
    met: int


class Negotiation:
    """One rank's side of the agreement among the ranks of a process set."""

    def __init__(self, rank: int, labels: Sequence[int], capacity: int = CAPACITY):
        """labels: the numbers by which errors name ranks."""
        self.rank, self.labels, self.size, self.capacity = rank, labels, len(labels), capacity
        self.ids: dict[Hashable, int] = {}
        self.slots: list[Slot | None] = []
        self.unused: list[int] = []
        self.mine, self.standing = bytearray(), bytearray()      # what I have submitted; what I say yes to anyhow
        self.pending: dict[int, Operation | None] = {}
        self.fresh: dict[Hashable, Operation | None] = {}        # submitted in this round, without a slot yet
        self.joined: dict[int, int] = {}                 # who has, in order; unnamed operations of each until then
        self.round = self.signature = 0

    @property
    def waiting(self) -> bool:
        """Whether something that was submitted is not agreed yet."""
        return bool(self.pending or self.rank in self.joined)

    def compose(self, operations: Iterable[Operation], seals: Iterable[tuple] = (), news: News = ()) -> tuple[np.ndarray, News]:
        """Return this rank's words, for the AND of all, and its news; `news` are those about itself."""
        told = list(news)
        for operation in operations:
            slot = self._submit(operation.key, operation)
            said = None if slot is None else self.slots[slot].of[self.rank]
            if said is not operation.description and said != operation.description:
                told.append((operation.key, operation.description))
        for key in seals:
            if self._submit(key, None) is None:
                told.append((key, Description(SEAL)))
        mine = np.packbits(self.mine)
        words = np.empty(1 + 2 * mine.size, np.uint8)
        words[0] = NEWS if told else NO_NEWS
        words[1:1 + mine.size] = 0xFF if self.rank in self.joined else mine | np.packbits(self.standing)
        words[1 + mine.size:] = ~mine
        return words, told

    def _submit(self, key: Hashable, operation: Operation | None) -> int | None:
        slot = self.ids.get(key)
        if slot is None:
            self.fresh[key] = operation
        else:
            self.pending[slot] = operation
            self.mine[slot] = 1
        return slot

    def agree(self, words: np.ndarray, told: Sequence[News] = ()) -> Outcome:
        """Return what a round has brought: from the AND of all words, and every rank's news if there are any."""
        self.round += 1
        half, absent = words.size // 2, set(self.joined)
        ready = _ones(words[1:1 + half], len(self.slots))
        idle = _ones(words[1 + half:], len(self.slots)) if len(self.ids) > self.capacity else []
        leaving, spoken, made = self._hear(told)
        # Of new slots nobody has given a bit yet: who has spoken of one has submitted it.
        ready += [slot for slot in made if len(spoken[slot] | absent) == self.size or self.slots[slot].of[0].kind == SEAL]
        if 0 in absent:                                  # who names groups has left
            ready = [slot for slot in ready if self.slots[slot].of[0].kind != SEAL]
        agreed = [self._settle(slot, absent) for slot in ready]
        self._forget(idle, spoken)
        last, met = None, 0
        if len(self.joined) == self.size:
            last, met = list(self.joined)[-1], max(self.joined.values())
            self.joined.clear()
        return Outcome(agreed, leaving, last, met)

    def _hear(self, told: Sequence[News]) -> tuple[list[int], dict[int, set[int]], list[int]]:
        """Take in all ranks' news; return who leaves, who has spoken of which slots, and which are new."""
        leaving: list[int] = []
        spoken: dict[int, set[int]] = {}
        made: list[int] = []
        for rank, news in enumerate(told):
            for key, what in news:
                if key == SHUTDOWN:
                    leaving.append(rank)
                elif key == JOIN:
                    self.joined[rank] = what
                else:
                    if key not in self.ids:
                        made.append(self._make(key, what))
                    self.signature += 1
                    self.slots[self.ids[key]].say(rank, what, self.signature)
                    spoken.setdefault(self.ids[key], set()).add(rank)
        for key, operation in self.fresh.items():
            self.pending[self.ids[key]] = operation
            self.mine[self.ids[key]] = 1
        self.fresh.clear()
        return leaving, spoken, made

    def _make(self, key: Hashable, description: Description) -> int:
        """Make a name's slot; the first rank that says what it is speaks for those that have not said so yet."""
        slot = heappop(self.unused) if self.unused else len(self.slots)
        if slot == len(self.slots):
            self.slots.append(None)
            self.mine.append(0)
            self.standing.append(0)
        self.ids[key], self.slots[slot] = slot, Slot(key, description, self.size)
        self.standing[slot] = description.kind == SEAL and self.rank != 0
        return slot

    def _settle(self, index: int, absent: set[int]) -> Slot:
        """Take a slot that all ranks are ready for; see whether they agree what it is."""
        slot = self.slots[index]
        slot.used, self.mine[index] = self.round, 0
        slot.operation, slot.error = self.pending.pop(index, None), None
        if slot.alike and not absent:
            return slot
        said: dict[Description, list[int]] = {}
        for rank in range(self.size):
            if rank not in absent:
                said.setdefault(slot.of[rank], []).append(rank)
        slot.description = next(iter(said))
        if len(said) > 1:
            slot.error = MismatchError(f"{shown(slot.key)}: ranks disagree: " + "; ".join(
                f"{self.named(ranks)}: {what}" for what, ranks in said.items()))
        elif absent and not slot.description.for_absent:
            slot.error = MismatchError(f"{shown(slot.key)}: {slot.description}, but {self.named(sorted(absent))} joined, and only "
                                       f"allreduces by MPI's own ops go on without a rank's data")
        return slot

    def _forget(self, idle: list[int], spoken: dict[int, set[int]]) -> None:
        """Let go of the slots that were not used for longest, of those that nobody had submitted when the round began."""
        free = [slot for slot in idle if self.slots[slot] is not None and slot not in spoken]
        for slot in sorted(free, key=lambda slot: self.slots[slot].used)[:len(self.ids) - self.capacity]:
            del self.ids[self.slots[slot].key]
            self.slots[slot], self.standing[slot] = None, 0
            heappush(self.unused, slot)

    def named(self, ranks: Sequence[int]) -> str:
        """Write ranks by their labels: ranks 0, 2."""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(self.labels[rank]) for rank in ranks)}"


def _ones(words: np.ndarray, count: int) -> list[int]:
    """Return the places of the ones among the first bits."""
    return np.unpackbits(words, count=count).nonzero()[0].tolist()
