"""The agreement about what is ready, among ranks that are simulated: no MPI, every order of submission."""

import pickle
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiring.engine.negotiation import BLOCK, JOIN, NO_NEWS, SHUTDOWN, Negotiation
from mpiring.engine.operation import SEAL, Description, Operation

SUM = Description("allreduce", ("float32",), ((3,),), "SUM")
MAX = Description("allreduce", ("float32",), ((3,),), "MAX")
GATHER = Description("allgather", ("float32",), ((None,),))
NAMES = "abcdefgh"


class Ranks:
    """The ranks of a process set, in one process. told: what was gathered in the last round; () if bytes were enough."""

    def __init__(self, size, capacity=1 << 14, labels=None):
        self.sides = [Negotiation(rank, labels or range(size), capacity) for rank in range(size)]
        self.size, self.told, self.outcome = size, (), None

    def round(self, submitted, seals=(), news=None):
        """Do a round; return [(key, error's text, ranks whose operation it was)] of what is ready, the same on all ranks.

        submitted: by rank, {key: Description} in the order of submission. seals: rank 0's. news: by rank, about itself.
        """
        operations = [[made(key, what) for key, what in submitted.get(rank, {}).items()] for rank in range(self.size)]
        composed = [side.compose(operations[side.rank], () if side.rank else seals, (news or {}).get(side.rank, []))
                    for side in self.sides]
        assert len({len(words) for words, _ in composed}) == 1, "bytes for other slots"
        total = np.bitwise_and.reduce([np.frombuffer(bytes(words), np.uint8) for words, _ in composed]).tobytes()
        self.told = () if total[0] == NO_NEWS else [told for _, told in composed]
        assert bool(self.told) == any(told for _, told in composed)
        outcomes = [side.agree(total, self._heard(side.rank)) for side in self.sides]
        return self._same(outcomes)

    def _heard(self, rank):
        """Return the news as they arrive: equal to what was said, and not the same objects, but for the rank's own."""
        return [told if teller == rank else pickle.loads(pickle.dumps(told)) for teller, told in enumerate(self.told)]

    def _same(self, outcomes):
        """See that all ranks have come to the same, and take out of the slots what the engine takes."""
        found, owners = [], defaultdict(set)
        for rank, outcome in enumerate(outcomes):
            ready = []
            for slot in outcome.ready:
                ready.append((slot.key, slot.description, slot.signature, slot.error and str(slot.error)))
                if slot.operation is not None:
                    assert slot.operation.key == slot.key
                    owners[slot.key].add(rank)
                slot.operation = slot.error = None
            found.append((ready, outcome[1:], self._state(self.sides[rank])))
        assert all(other == found[0] for other in found[1:])
        self.outcome = outcomes[0]
        return [(key, error, owners[key]) for key, _, _, error in found[0][0]]

    def _state(self, side):
        """Return what all ranks must know alike."""
        slots = {index: (slot.key, slot.of, slot.signature, slot.used) for index, slot in enumerate(side.slots) if slot}
        assert {key: index for index, (key, *_) in slots.items()} == side.ids
        return slots, side.unused, list(side.joined.items()), len(side.words), side.signature

    def together(self, *keys, what=SUM, **options):
        """Submit the same on all ranks; return the keys that are ready."""
        return [key for key, _, _ in self.round({rank: dict.fromkeys(keys, what) for rank in range(self.size)}, **options)]


def made(key, what):
    """Return an operation that was just submitted: what it is, in an object of its own."""
    operation = Operation(Description(*what), None, [], [], None, 0)
    operation.key = key
    return operation


def submissions(names=NAMES):
    """Draw for each of up to 4 ranks and 12 rounds which names it submits, in its own order."""
    order = st.lists(st.sampled_from(names), unique=True, max_size=5)
    return st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), st.lists(
        st.lists(order, min_size=size, max_size=size), min_size=1, max_size=12)))


def runs(size, rounds, ranks, what=lambda rank, turn, key: SUM):
    """Submit what was drawn, but for what is on its way; yield after each round: what is ready, who waits for what, what is new."""
    waiting = {rank: {} for rank in range(size)}
    for turn, orders in enumerate(rounds):
        fresh = {rank: {key: what(rank, turn, key) for key in order if key not in waiting[rank]}
                 for rank, order in enumerate(orders)}
        for rank, found in fresh.items():
            waiting[rank].update(found)
        yield ranks.round(fresh), waiting, fresh


# ----------------------------------------------------------------- readiness

@given(submissions())
def test_what_all_have_submitted_is_ready_at_once_and_nothing_else(case):
    size, rounds = case
    ranks = Ranks(size)
    for ready, waiting, _ in runs(size, rounds, ranks):
        assert {key for key, _, _ in ready} == set.intersection(*map(set, waiting.values()))
        for key, error, owners in ready:
            assert error is None and owners == {*range(size)}
            for mine in waiting.values():
                del mine[key]
        assert [side.waiting for side in ranks.sides] == [bool(mine) for mine in waiting.values()]


@given(submissions())
def test_a_name_is_told_once_by_each_rank_at_most_and_then_goes_by_a_byte(case):
    size, rounds = case
    ranks, known = Ranks(size), set()
    for ready, waiting, fresh in runs(size, rounds, ranks):
        new = {key for found in fresh.values() for key in found} - known
        told = [{key for key, _ in mine} for mine in ranks.told] or [set()] * size
        assert told == [new & set(fresh[rank]) for rank in range(size)], "news of a name that has a slot"
        known |= new
        for key, _, _ in ready:
            for mine in waiting.values():
                del mine[key]


@given(st.permutations(NAMES), st.permutations(NAMES))
def test_the_order_of_what_is_ready_is_that_of_slots(first, second):
    ranks = Ranks(2)
    orders = {0: dict.fromkeys(first, SUM), 1: dict.fromkeys(second, SUM)}
    assert [key for key, _, _ in ranks.round(orders)] == list(first), "new slots: rank 0 speaks first"
    assert [key for key, _, _ in ranks.round({0: orders[1], 1: orders[0]})] == list(first)
    assert not ranks.told


def test_more_names_than_the_words_have_room_for():
    ranks = Ranks(3)
    names = [str(number) for number in range(3 * BLOCK)]
    assert ranks.together(*names) == names and ranks.told
    for order in (names[::-1], names[BLOCK:] + names[:BLOCK]):
        assert ranks.together(*order) == names and not ranks.told
    assert len(ranks.sides[0].words) == 1 + 4 * BLOCK
    assert ranks.round({0: dict.fromkeys(names, SUM)}) == []
    assert ranks.round({1: {"late": SUM, names[-1]: SUM}}) == []
    assert ranks.round({2: {names[-1]: SUM}}) == [(names[-1], None, {0, 1, 2})]


# ----------------------------------------------------------------- ranks that disagree

def test_a_mismatch_names_ranks_and_what_they_say():
    ranks = Ranks(3, labels=[4, 6, 9])
    for _ in range(2):                                   # told, then by a byte
        (key, error, owners), = ranks.round({0: {"a": SUM}, 1: {"a": MAX}, 2: {"a": SUM}})
        assert (key, owners) == ("a", {0, 1, 2})
        assert error == ("'a': ranks disagree: ranks 4, 9: allreduce of float32 (3,) by SUM; "
                         "rank 6: allreduce of float32 (3,) by MAX")
    assert not ranks.told
    assert ranks.round({rank: {"a": MAX} for rank in range(3)}) == [("a", None, {0, 1, 2})]
    assert [len(told) for told in ranks.told] == [1, 0, 1], "who says something new tells it"


def test_a_mismatch_with_what_was_said_rounds_ago():
    ranks = Ranks(2)
    assert ranks.round({0: {"a": SUM}}) == []
    assert ranks.together("b") == ["b"]
    (_, error, _), = ranks.round({1: {"a": GATHER}})
    assert "rank 0: allreduce of float32 (3,) by SUM; rank 1: allgather of float32 (*,)" in error


KINDS = [SUM, MAX, GATHER]


@given(submissions(), st.randoms(use_true_random=False))
def test_whoever_says_something_else_is_found_and_nobody_who_does_not(case, chance):
    size, rounds = case
    ranks = Ranks(size)
    for ready, waiting, _ in runs(size, rounds, ranks, lambda *_: chance.choice(KINDS)):
        for key, error, _ in ready:
            said = [mine.pop(key) for mine in waiting.values()]
            assert (error is not None) == (len(set(said)) > 1)
            assert error is None or all(f": {what}" in error for what in said)


def test_a_signature_is_a_slots_own_and_changes_with_what_it_is():
    ranks, seen = Ranks(2), []
    for submitted in ({"a": SUM, "b": SUM}, {"a": SUM, "b": SUM}, {"a": MAX, "b": SUM}):
        ranks.round({0: submitted, 1: submitted})
        seen.append({slot.key: slot.signature for slot in ranks.outcome.ready})
    assert seen[0] == seen[1] and seen[0]["a"] != seen[0]["b"]
    assert seen[2]["b"] == seen[0]["b"] and seen[2]["a"] not in (*seen[0].values(), 0)


# ----------------------------------------------------------------- join

def test_a_rank_that_has_joined_holds_nobody_up():
    ranks = Ranks(3)
    ranks.together("a")
    assert ranks.round({}, news={1: [(JOIN, 5)]}) == [] and ranks.outcome.last is None
    assert [side.waiting for side in ranks.sides] == [False, True, False]
    assert ranks.round({0: {"a": SUM, "new": SUM}}) == []
    assert ranks.round({2: {"new": SUM, "a": SUM}}) == [("a", None, {0, 2}), ("new", None, {0, 2})]
    assert ranks.round({}, news={2: [(JOIN, 7)]}) == [] and ranks.outcome.last is None
    assert ranks.round({0: {"a": SUM}}) == [("a", None, {0})]
    ranks.round({}, news={0: [(JOIN, 6)]})
    assert (ranks.outcome.last, ranks.outcome.met) == (0, 7)
    assert ranks.round({0: {"a": SUM}, 2: {"a": SUM}}) == [], "all are back"
    assert ranks.round({1: {"a": SUM}}) == [("a", None, {0, 1, 2})]


def test_all_join_at_once():
    ranks = Ranks(3)
    assert ranks.together("a", news={rank: [(JOIN, rank)] for rank in range(3)}) == ["a"]
    assert (ranks.outcome.last, ranks.outcome.met) == (2, 2)
    assert not any(side.waiting for side in ranks.sides)


def test_a_rank_joins_in_the_round_in_which_it_submits():
    ranks = Ranks(2)
    assert ranks.round({0: {"a": SUM}}, news={0: [(JOIN, 0)]}) == []
    assert ranks.round({1: {"a": SUM, "b": SUM}}) == [("a", None, {0, 1}), ("b", None, {1})]


@pytest.mark.parametrize("what", [GATHER, Description("broadcast", ("int8",), ((2,),), root=0), Description("barrier"),
                                  Description("allreduce", ("int8",), ((2,),), "an op made with MPI.Op.Create")],
                         ids=lambda what: str(what))
def test_what_needs_the_data_of_all_fails_on_the_ranks_that_wait(what):
    ranks = Ranks(3, labels=[0, 2, 5])
    ranks.round({}, news={1: [(JOIN, 0)]})
    for _ in range(2):
        (key, error, owners), = ranks.round({0: {"a": what}, 2: {"a": what}})
        assert (key, owners) == ("a", {0, 2})
        assert error.startswith(f"'a': {what}, but rank 2 joined")
    ranks.round({}, news={0: [(JOIN, 0)], 2: [(JOIN, 0)]})
    assert ranks.outcome.last == 2
    assert ranks.together("a", what=what) == ["a"]


def test_what_others_say_counts_where_a_rank_has_joined_that_said_something_else():
    ranks = Ranks(3)
    ranks.together("a")
    ranks.round({}, news={0: [(JOIN, 0)]})
    assert ranks.round({1: {"a": MAX}, 2: {"a": MAX}}) == [("a", None, {1, 2})]
    assert ranks.outcome.ready[0].description == MAX
    (_, error, _), = ranks.round({1: {"a": MAX}, 2: {"a": SUM}})
    assert "rank 1: " in error and "rank 2: " in error and "rank 0" not in error
    ranks.round({}, news={1: [(JOIN, 0)], 2: [(JOIN, 0)]})
    assert ranks.together("a", what=MAX) == ["a"] and ranks.outcome.ready[0].description == MAX


def test_what_a_rank_submitted_before_it_joined_must_agree_as_well():
    ranks = Ranks(2)
    assert ranks.round({1: {"a": MAX}}, news={1: [(JOIN, 0)]}) == []
    (_, error, owners), = ranks.round({0: {"a": SUM}})
    assert owners == {0, 1}
    assert error is not None and "rank 0: allreduce of float32 (3,) by SUM; rank 1: allreduce of float32 (3,) by MAX" in error


@given(st.integers(1, 4).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.tuples(
    st.integers(0, size - 1), st.sampled_from([*NAMES[:3], JOIN])), min_size=1, max_size=40))))
def test_joins_at_any_time(case):
    size, steps = case
    ranks, joined = Ranks(size), {}
    waiting = {rank: set() for rank in range(size)}
    for turn, (rank, key) in enumerate(steps):
        if rank in joined or key in waiting[rank]:
            continue
        absent = set(joined)
        if key == JOIN:
            joined[rank] = turn
            ready = ranks.round({}, news={rank: [(JOIN, turn)]})
        else:
            waiting[rank].add(key)
            ready = ranks.round({rank: {key: SUM}})
        expected = {key for key in NAMES[:3] if any(key in mine for mine in waiting.values())
                    and all(key in waiting[peer] or peer in absent for peer in range(size))}
        assert {(key, frozenset(owners)) for key, _, owners in ready} == {
            (key, frozenset(peer for peer in waiting if key in waiting[peer])) for key in expected}
        assert all(error is None for _, error, _ in ready)
        for mine in waiting.values():
            mine -= expected
        if len(joined) == size and any(waiting.values()):        # what was submitted before is done first, with zeros of the others
            assert ranks.outcome.last is None
            assert {key for key, _, _ in ranks.round({})} == set().union(*waiting.values())
            waiting = {rank: set() for rank in range(size)}
        over = len(joined) == size
        assert (ranks.outcome.last, ranks.outcome.met) == ((rank, turn) if over else (None, 0))
        if over:
            joined.clear()


# ----------------------------------------------------------------- seals, forgetting, the end

def test_only_rank_0_seals():
    ranks, seal = Ranks(3), (SEAL, "a", "b")
    for _ in range(3):
        assert ranks.together("a", "b", seals=[seal]) in (["a", "b", seal], [seal, "a", "b"])
        assert ranks.together("a") == ["a"], "nobody has sealed anything"
    assert not ranks.told
    assert ranks.round({1: {"a": SUM}}, seals=[seal]) == [(seal, None, set())], "whatever other ranks have submitted"
    assert ranks.round({0: {"a": SUM}}, seals=[seal, (SEAL, "b")])[-1] == ((SEAL, "b"), None, set())
    assert not any(side.waiting for side in ranks.sides[2:])


def test_seals_while_ranks_have_joined():
    ranks, seal = Ranks(3), (SEAL, "a")
    ranks.round({}, news={1: [(JOIN, 0)]})
    for _ in range(2):
        assert ranks.round({0: {"a": SUM}, 2: {"a": SUM}}, seals=[seal]) == [("a", None, {0, 2}), (seal, None, set())]
    ranks.round({}, news={0: [(JOIN, 0)], 2: [(JOIN, 0)]})
    assert ranks.round({1: {"a": SUM}}) == []


def test_the_least_recently_used_are_forgotten():
    ranks = Ranks(2, capacity=2)
    for key in "abac":
        assert ranks.together(key) == [key]
    assert {*ranks.sides[0].ids} == {"a", "c"}
    assert ranks.together("a") == ["a"] and not ranks.told
    assert ranks.together("b") == ["b"] and ranks.told
    assert {*ranks.sides[0].ids} == {"a", "b"}


@given(submissions(), st.integers(0, 3))
def test_whatever_somebody_waits_for_is_kept(case, capacity):
    size, rounds = case
    ranks = Ranks(size, capacity)
    for ready, waiting, fresh in runs(size, rounds, ranks):
        assert {key for key, _, _ in ready} == set.intersection(*map(set, waiting.values()))
        kept = set(ranks.sides[0].ids)
        used = {key for found in [*waiting.values(), *fresh.values()] for key in found}
        assert {key for mine in waiting.values() for key in mine} <= kept
        assert len(kept) <= capacity or kept <= used, "something idle was kept beyond the capacity"
        assert len(ranks.sides[0].slots) <= len(NAMES), "places are used again"
        for key, _, _ in ready:
            for mine in waiting.values():
                del mine[key]


def test_a_name_that_was_forgotten_may_be_something_else():
    ranks = Ranks(2, capacity=1)
    ranks.together("a")
    ranks.together("b")
    assert ranks.round({rank: {"a": GATHER} for rank in range(2)}) == [("a", None, {0, 1})]
    assert ranks.outcome.ready[0].description == GATHER


def test_seals_are_forgotten_like_names():
    ranks = Ranks(2, capacity=2)
    for key in "abcab":
        assert ranks.together(key, seals=[(SEAL, key)]) == [key, (SEAL, key)]
        assert not any(side.waiting for side in ranks.sides)
    assert len(ranks.sides[1].ids) <= 4
    assert ranks.round({0: {"d": SUM}}) == [] and ranks.round({1: {"d": SUM}}) == [("d", None, {0, 1})], "on a slot of a seal's"


def test_who_shuts_down_is_known_to_all_and_what_is_ready_is_done_before():
    ranks = Ranks(3)
    assert ranks.together("a", news={2: [(SHUTDOWN, None)], 0: [(SHUTDOWN, None)]}) == ["a"]
    assert ranks.outcome.leaving == [0, 2]
    assert ranks.together("a") == ["a"] and ranks.outcome.leaving == []


def test_ranks_are_named_by_their_labels():
    side = Negotiation(0, [3, 5, 8])
    assert side.named([1]) == "rank 5" and side.named([0, 2]) == "ranks 3, 8"
