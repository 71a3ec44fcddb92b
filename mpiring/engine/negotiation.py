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

from mpiring.engine.operation import Description, Operation, shown
from mpiring.errors import MismatchError

CAPACITY = 16384
"""Slots that are kept, at least; the least recently used go when there are more and nobody waits for them."""

NO_NEWS, NEWS = 0xFF, 0xFE

SEAL = "seal"
"""The kind of a slot whose bit rank 0 alone gives: that a burst has its members, for fixed groups."""

JOIN, SHUTDOWN = ("join",), ("shutdown",)
"""News that are about a rank, not an operation."""

News = list[tuple[Hashable, Any]]


class Slot:
    """A name: what each rank said last that it is; a number that changes with that; the round in which it was ready last.

    alike: whether all ranks said the same.
    """

    __slots__ = ("alike", "key", "of", "signature", "used")

    def __init__(self, key: Hashable, description: Description, size: int):
        self.key, self.of, self.alike, self.signature, self.used = key, [description] * size, True, 0, 0


class Agreed(NamedTuple):
    """An operation that all ranks are ready for; `operation` is None on a rank that has joined."""

    slot: int
    signature: int
    description: Description
    operation: Operation | None
    error: MismatchError | None
    key: Hashable


class Outcome(NamedTuple):
    """What a round has brought, equal on all ranks but for their own operations.

    leaving: ranks that shut the engine down. last: who joined last, if all have by now; met: unnamed operations until then.
    """

    ready: list[Agreed]
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
        mine = np.frombuffer(self.mine, np.uint8)
        if self.rank in self.joined:
            given = np.ones_like(mine)
        else:
            given = mine | np.frombuffer(self.standing, np.uint8)
        head = np.array([NEWS if told else NO_NEWS], np.uint8)
        return np.concatenate([head, np.packbits(given), np.packbits(mine ^ 1)]), told

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
        given, idle = (np.unpackbits(part, count=len(self.slots)) for part in np.split(words[1:], 2))
        absent = set(self.joined)
        leaving, spoken, made = self._hear(told)
        ready = np.flatnonzero(given).tolist()
        # Of new slots nobody has given a bit yet: who has spoken of one has submitted it.
        ready += [slot for slot in made if len(spoken[slot] | absent) == self.size or self.slots[slot].of[0].kind == SEAL]
        agreed = [self._settle(slot, absent) for slot in ready if not (0 in absent and self.slots[slot].of[0].kind == SEAL)]
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
                    slot = self.ids[key]
                    entry = self.slots[slot]
                    entry.of[rank], entry.signature = what, self.signature + 1
                    self.signature += 1
                    spoken.setdefault(slot, set()).add(rank)
        for entry in map(self.slots.__getitem__, spoken):
            entry.alike = all(what == entry.of[0] for what in entry.of)
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

    def _settle(self, slot: int, absent: set[int]) -> Agreed:
        """Take a slot that all ranks are ready for; see whether they agree what it is."""
        entry = self.slots[slot]
        entry.used, self.mine[slot] = self.round, 0
        operation = self.pending.pop(slot, None)
        if entry.alike and not absent:
            return Agreed(slot, entry.signature, entry.of[0], operation, None, entry.key)
        said: dict[Description, list[int]] = {}
        for rank in range(self.size):
            if rank not in absent:
                said.setdefault(entry.of[rank], []).append(rank)
        description = next(iter(said))
        error = None
        if len(said) > 1:
            error = MismatchError(f"{shown(entry.key)}: ranks disagree: " + "; ".join(
                f"{self.named(ranks)}: {what}" for what, ranks in said.items()))
        elif absent and description.kind not in ("allreduce", SEAL):
            error = MismatchError(f"{shown(entry.key)}: {description}, but {self.named(sorted(absent))} joined, and only "
                                  f"allreduces go on without a rank's data")
        return Agreed(slot, entry.signature, description, operation, error, entry.key)

    def _forget(self, idle: np.ndarray, spoken: dict[int, set[int]]) -> None:
        """Let go of the slots that were not used for longest, of those that nobody had submitted when the round began."""
        excess = len(self.ids) - self.capacity
        if excess <= 0:
            return
        free = [slot for slot in np.flatnonzero(idle).tolist() if self.slots[slot] is not None and slot not in spoken]
        for slot in sorted(free, key=lambda slot: self.slots[slot].used)[:excess]:
            del self.ids[self.slots[slot].key]
            self.slots[slot], self.standing[slot] = None, 0
            heappush(self.unused, slot)

    def named(self, ranks: Sequence[int]) -> str:
        """Write ranks by their labels: ranks 0, 2."""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(self.labels[rank]) for rank in ranks)}"

