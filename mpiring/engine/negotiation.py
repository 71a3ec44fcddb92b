"""What all ranks are ready for: names they have met before are agreed by a byte each, new ones are described once. No MPI here.

Every rank keeps the same list of slots, one for a name, and knows of each what every rank said last that it is. A round:

1. compose: each rank gives a byte for every slot, whether it has submitted that, and its news: names without a slot, and
   operations that are not what it said last.
2. The bytes of all ranks are combined by bitwise AND; where somebody has news, all ranks' news are gathered.
3. agree: from these, which are the same on all ranks, each rank works out what is ready, what is at odds, and the new slots.

So no rank leads.
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

NO_NEWS, NEWS = 1, 0
"""The first byte."""

SUBMITTED, IDLE, EITHER = 0b01, 0b10, 0b11
"""The byte of a slot; EITHER is of a rank that has joined, or has no say. The AND of all is SUBMITTED where a slot is ready (all
have submitted it, or have no say), and has the bit of IDLE where nobody has submitted it, so that it may be forgotten.
"""

BLOCK = 64
"""Slots that the words have room for, at least; the room is doubled when there are more."""

JOIN, SHUTDOWN = ("join",), ("shutdown",)
"""News that are about a rank, not an operation."""

News = list[tuple[Hashable, Any]]


class Slot:
    """A name, and what each rank said last that it is.

    description: what all say. alike: whether they do. signature: a number that changes with what they say, and is no other slot's.
    used: the round in which it was ready last. operation, error: of this rank, when it is ready; the operation is None on a rank
    that has joined. led: whether rank 0 has submitted it, rather than joined.
    """

    __slots__ = ("alike", "description", "error", "key", "led", "of", "operation", "parts", "signature", "used")

    def __init__(self, key: Hashable, description: Description, size: int):
        self.key, self.of, self.description, self.alike = key, [description] * size, description, True
        self.signature = self.used = 0
        self.parts: Any = None                           # how its arrays may go together, kept by who works that out
        self.operation: Operation | None = None
        self.error: MismatchError | None = None
        self.led = True

    def say(self, rank: int, description: Description, signature: int) -> None:
        """Take note of what a rank says that this is."""
        self.of[rank], self.signature, self.parts = description, signature, None
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
        self.said: list[Description] = []                # by slot, what this rank said last: as in Slot.of, but in one place
        self.unused: list[int] = []
        self.words = bytearray([NO_NEWS]) + bytes([IDLE]) * BLOCK        # what this rank says: one byte, and one of each slot
        self.pending: dict[int, Operation | None] = {}
        self.fresh: dict[Hashable, Operation | None] = {}        # submitted in this round, without a slot yet
        self.joined: dict[int, int] = {}                 # who has, in order; unnamed operations of each until then
        self.owed: dict[int, set[Hashable]] = {}         # what they had submitted before, and is not agreed yet
        self.round = self.signature = 0

    @property
    def waiting(self) -> bool:
        """Whether something that was submitted is not agreed yet."""
        return bool(self.pending or self.rank in self.joined)

    def compose(self, operations: Iterable[Operation], seals: Iterable[tuple] = (), news: News = ()) -> tuple[bytearray, News]:
        """Return this rank's words, for the AND of all, and its news; `news` are about itself: JOIN with its unnamed operations.

        The words must stay as they are until agree is called.
        """
        told: News = []
        ids, said, pending, words, fresh = self.ids.get, self.said, self.pending, self.words, self.fresh
        for operation in operations:                     # as _submit does, but for the calls: there may be thousands
            key, description = operation.key, operation.description
            index = ids(key)
            if index is None:
                fresh[key] = operation
                told.append((key, description))
                continue
            pending[index] = operation
            words[index + 1] = SUBMITTED
            before = said[index]
            if before is not description:
                if before != description:
                    told.append((key, description))
                else:
                    said[index] = description            # to know it next time without a comparison
        for key in seals:
            if self._submit(key, None) is None:
                told.append((key, Description(SEAL)))
        owed = {*fresh, *(self.slots[index].key for index in pending)} if news else ()
        told += [(key, (what, owed)) if key == JOIN else (key, what) for key, what in news]
        words = self.words
        if self.rank in self.joined:
            words = words[:1] + bytes(byte | SUBMITTED for byte in words[1:])
        words[0] = NEWS if told else NO_NEWS
        return words, told

    def _submit(self, key: Hashable, operation: Operation | None) -> int | None:
        index = self.ids.get(key)
        if index is None:
            self.fresh[key] = operation
        else:
            self.pending[index] = operation
            self.words[index + 1] = SUBMITTED
        return index

    def agree(self, total: bytes | bytearray, told: Sequence[News] = ()) -> Outcome:
        """Return what a round has brought: from the AND of all words, and every rank's news if there are any."""
        self.round += 1
        absent = set(self.joined)
        said = np.frombuffer(total, np.uint8, offset=1)
        ready = (said == SUBMITTED).nonzero()[0].tolist()
        leaving: list[int] = []
        spoken: dict[int, set[int]] = {}
        if told:
            leaving, spoken, made = self._hear(told)
            # Of new slots nobody has given a byte yet: who has spoken of one has submitted it.
            ready += [index for index in made if len(spoken[index] | absent) == self.size or self.slots[index].of[0].kind == SEAL]
        slots, pop, words, number = self.slots, self.pending.pop, self.words, self.round
        agreed = []
        for index in ready:
            slot = slots[index]
            agreed.append(slot)
            slot.used, slot.operation, slot.led = number, pop(index, None), True
            words[index + 1] = IDLE
            if self.joined or not slot.alike or slot.description.kind == SEAL:
                self._settle(index, absent)
        if len(self.ids) > self.capacity:
            self._forget((said & IDLE).nonzero()[0].tolist(), spoken)
        last, met = None, 0
        if len(self.joined) == self.size and not any(self.owed.values()):
            last, met = list(self.joined)[-1], max(self.joined.values())
            self.joined.clear()
            self.owed.clear()
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
                    self.joined[rank], self.owed[rank] = what
                else:
                    if key not in self.ids:
                        made.append(self._make(key, what))
                    index = self.ids[key]
                    self.signature += 1
                    self.slots[index].say(rank, what, self.signature)
                    spoken.setdefault(index, set()).add(rank)
                    if rank == self.rank:
                        self.said[index] = what
        for key, operation in self.fresh.items():
            self._submit(key, operation)
        self.fresh.clear()
        return leaving, spoken, made

    def _make(self, key: Hashable, description: Description) -> int:
        """Make a name's slot; the first rank that says what it is speaks for those that have not said so yet."""
        index = heappop(self.unused) if self.unused else len(self.slots)
        if index == len(self.slots):
            self.slots.append(None)
            self.said.append(description)
            if index + 1 == len(self.words):
                self.words += bytes([IDLE]) * index
        self.ids[key], self.slots[index], self.said[index] = index, Slot(key, description, self.size), description
        self.words[index + 1] = IDLE
        return index

    def _settle(self, index: int, absent: set[int]) -> None:
        """See whether the ranks agree what a slot is that all are ready for."""
        slot = self.slots[index]
        if slot.description.kind == SEAL and self.rank:
            self.words[index + 1] = EITHER
        absent = {rank for rank in absent if slot.key not in self.owed[rank]}
        slot.led = 0 not in absent
        for keys in self.owed.values():
            keys.discard(slot.key)
        if slot.alike and not absent:
            return
        said: dict[Description, list[int]] = {}
        for rank in range(self.size):
            if rank not in absent:
                said.setdefault(slot.of[rank], []).append(rank)
        description = next(iter(said))
        if description != slot.description:              # those who have joined had said something else
            self.signature += 1
            slot.description, slot.signature, slot.parts = description, self.signature, None
        if len(said) > 1:
            slot.error = MismatchError(f"{shown(slot.key)}: ranks disagree: " + "; ".join(
                f"{self.named(ranks)}: {what}" for what, ranks in said.items()))
        elif absent and not slot.description.for_absent:
            slot.error = MismatchError(f"{shown(slot.key)}: {slot.description}, but {self.named(sorted(absent))} joined, and only "
                                       f"allreduces by MPI's own ops go on without a rank's data")

    def _forget(self, idle: list[int], spoken: dict[int, set[int]]) -> None:
        """Let go of the slots that were not used for longest, of those that nobody had submitted when the round began."""
        free = [index for index in idle if index < len(self.slots) and self.slots[index] is not None and index not in spoken]
        for index in sorted(free, key=lambda index: self.slots[index].used)[:len(self.ids) - self.capacity]:
            del self.ids[self.slots[index].key]
            self.slots[index], self.words[index + 1] = None, IDLE
            heappush(self.unused, index)

    def named(self, ranks: Sequence[int]) -> str:
        """Write ranks by their labels: ranks 0, 2."""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(self.labels[rank]) for rank in ranks)}"
