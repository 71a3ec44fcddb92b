"""verify proves right schedules for every size, and names rank, step and chunk of wrong ones."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiring import ScheduleError
from mpiring.algorithms.registry import ALGORITHMS, Algorithm, find, names
from mpiring.algorithms.setting import Setting, rings
from mpiring.algorithms.step import IDLE, Step, one
from mpiring.analysis.replay import replay
from mpiring.analysis.verify import prove, verify

RING, TREE = find("ring"), find("tree")
BY_NODE = [key for key, algorithm in ALGORITHMS.items() if algorithm.by_node]


@pytest.mark.parametrize("collective, name", ALGORITHMS)
def test_every_algorithm_for_every_size_to_64_with_its_cost_lines(collective, name):
    algorithm = find(name, collective)
    for size in range(1, 65):
        for setting in settings(algorithm, size):
            proof = prove(algorithm, setting)
            assert proof.rounds == algorithm.rounds(setting) and proof.sent <= algorithm.sent(setting)
            assert proof.sent == algorithm.sent(setting) or setting.root
            assert len(list(algorithm.steps(size - 1, setting))) == proof.rounds


def settings(algorithm, size):
    """Yield settings that the cost lines are for: other pieces, other roots, nodes of equal size."""
    yield Setting(size, pieces=3 if algorithm.pieces else 1)
    if algorithm.collective.rooted:
        yield Setting(size, size // 2)
        yield Setting(size, size - 1, 2)
    if "members" in algorithm.needs:
        yield from (Setting(size, nodes=tuple(rank // per_node for rank in range(size)))
                    for per_node in range(1, size) if size % per_node == 0)


@pytest.mark.parametrize("collective, name", ALGORITHMS)
def test_larger_sizes(collective, name):
    """A few of them: python -m mpiring verify --all --draw 100 proves many."""
    for size in (65, 96, 129):
        prove(find(name, collective), Setting(size, root=size // 3 if find(name, collective).collective.rooted else 0))


@given(st.data())
def test_drawn_layouts(data):
    """Nodes of any size in any order, rings through the ranks in any order with any weights, any root, any pieces."""
    size = data.draw(st.integers(1, 24))
    for algorithm in ALGORITHMS.values():
        setting = Setting(size, data.draw(st.integers(0, size - 1)) if algorithm.collective.rooted else 0,
                          data.draw(st.integers(1, 5)) if algorithm.pieces else 1)
        if "members" in algorithm.needs or algorithm.by_node:
            setting = replace(setting, nodes=tuple(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))))
        if "all_rings" in algorithm.needs:
            orders = data.draw(st.lists(st.permutations(range(size)), min_size=1, max_size=3))
            weights = data.draw(st.lists(st.integers(1, 4), min_size=len(orders), max_size=len(orders)))
            setting = replace(setting, rings=rings(orders, weights))
        proof = prove(algorithm, setting)
        assert proof.rounds == algorithm.rounds(setting)


def dealt(size):
    """Return layouts of ranks on nodes: in blocks, in turn, of unequal sizes, from both ends, at random to the eye."""
    ways = (lambda rank: rank // 3, lambda rank: rank * 2 // size, lambda rank: rank % 2, lambda rank: -rank % 3,
            lambda rank: rank % 4 // 3, lambda rank: min(rank, size - 1 - rank), lambda rank: 7 * rank * rank % 5)
    return [tuple(map(way, range(size))) for way in ways]


@pytest.mark.parametrize("key", BY_NODE, ids=str)
def test_the_proof_holds_however_the_ranks_are_dealt_to_nodes(key):
    algorithm = ALGORITHMS[key]
    for size in range(2, 13):
        plain = prove(algorithm, Setting(size))
        for nodes in dealt(size):
            assert prove(algorithm, Setting(size, nodes=nodes))[:3] == plain[:3]
            if algorithm.collective.rooted:
                prove(algorithm, Setting(size, size // 2, nodes=nodes))
                prove(algorithm, Setting(size, size - 1, nodes=nodes))


def crossings(algorithm, setting):
    """Yield for every round how many messages leave each node, and how many enter it."""
    for steps in replay(algorithm, setting):
        ends = [(setting.nodes[rank], setting.nodes[step.send_to]) for rank, step in enumerate(steps) if step.send_to is not None]
        apart = [(a, b) for a, b in ends if a != b]
        yield Counter(a for a, _ in apart), Counter(b for _, b in apart)


@pytest.mark.parametrize("key", [key for key in BY_NODE if ALGORITHMS[key].cyclic], ids=str)
def test_a_ring_leaves_each_node_once_and_enters_it_once_in_every_round(key):
    for size in range(2, 13):
        for nodes in dealt(size):
            once = dict.fromkeys(nodes, 1) if len(set(nodes)) > 1 else {}
            assert all(out == into == once for out, into in crossings(ALGORITHMS[key], Setting(size, nodes=nodes)))


def test_a_ring_by_rank_would_leave_nodes_more_often():
    by_rank, in_turn = replace(RING, by_node=False), Setting(8, nodes=(0, 1) * 4)
    assert all(out == into == {0: 4, 1: 4} for out, into in crossings(by_rank, in_turn))


@pytest.mark.parametrize("root", range(5))
def test_a_ring_below_a_root_goes_round_from_there(root):
    """The ring of a broadcast or a reduction leaves each node once at most; its tree has levels of its own."""
    for key, ring in ((("broadcast", "scatter_allgather"), slice(3, None)), (("reduce", "reduce_scatter_gather"), slice(4))):
        found = list(crossings(ALGORITHMS[key], Setting(5, root, nodes=(0, 1, 0, 1, 0))))[ring]
        assert len(found) == 4 and all(max(messages.values(), default=0) <= 1 for both in found for messages in both)


def test_the_order_by_node():
    setting = Setting(6, 3, nodes=(5, 2, 5, 2, 9, 5))
    assert setting.by_node == [0, 2, 5, 1, 3, 4]
    assert setting.turned_by_node == ((3, 4, 0, 2, 5, 1), (2, 5, 3, 0, 1, 4))
    assert setting.turned == ((3, 4, 5, 0, 1, 2), (3, 4, 5, 0, 1, 2))
    assert replace(setting, root=0).turned is Setting(6, nodes=(1, 1, 0, 0, 7, 7)).turned_by_node is None
    assert [ring.order for ring in Setting(5, nodes=(0, 1, 0, 1, 0)).all_rings] == [(0, 2, 4, 1, 3), (0, 4, 3, 2, 1)]


def test_a_schedule_of_ones_own_by_node():
    line = replace(find("pipelined_tree"), name="line", by_node=True)
    assert prove(line, Setting(5, pieces=2, nodes=(0, 1, 0, 1, 0))) == prove(line, Setting(5, pieces=2))._replace(ordered=False)
    with pytest.raises(ValueError, match=r"algorithm 'tree' is by_node, .* it cannot need \['root'\]"):
        replace(find("tree", "reduce"), by_node=True)


@pytest.mark.parametrize("key", [key for key, algorithm in ALGORITHMS.items() if algorithm.cyclic], ids=str)
def test_schedules_that_turn_are_rank_0s_moved_on(key):
    for size in (1, 2, 3, 7, 16, 33):
        settings = [Setting(size), Setting(size, size // 2), *(Setting(size, nodes=nodes) for nodes in dealt(size))]
        assert ALGORITHMS[key].turns(settings[0]) and ALGORITHMS[key].turns(settings[2])
        assert all(is_moved_on(ALGORITHMS[key], setting) for setting in settings if ALGORITHMS[key].turns(setting))


@pytest.mark.parametrize("key", [key for key, algorithm in ALGORITHMS.items() if algorithm.cyclic], ids=str)
def test_schedules_by_node_turn_where_nodes_do_not_change_the_order(key):
    algorithm = ALGORITHMS[key]
    in_blocks, in_turn = (Setting(7, nodes=nodes) for nodes in ((0, 0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2, 0)))
    assert algorithm.turns(in_blocks) and not algorithm.turns(Setting(7, 3)) and not algorithm.turns(Setting(7, 3, nodes=(0,) * 7))
    assert algorithm.turns(in_turn) == is_moved_on(algorithm, in_turn) == (not algorithm.by_node)


def is_moved_on(algorithm, setting):
    """Tell whether every rank's steps are rank 0's with its number added."""
    size, first = setting.size, list(algorithm.steps(0, setting))

    def moved(peer, chunks, rank):
        block = chunks[0] // size * size if chunks else 0
        return None if peer is None else (peer + rank) % size, [block + (chunk + rank) % size for chunk in chunks]

    return all((step.send_to, list(step.send)) == moved(other.send_to, other.send, rank)
               and (step.recv_from, list(step.recv)) == moved(other.recv_from, other.recv, rank)
               for rank in range(size) for step, other in zip(algorithm.steps(rank, setting), first, strict=True))


def test_the_proof_says_what_was_found():
    assert verify("ring", 8) == (14, 8 * 14, Fraction(14, 8), False)
    assert verify("tree", 8) == (6, 14, 3, True)
    assert verify("hierarchical", 8, nodes=[0, 0, 1, 1, 2, 2, 3, 3]) == (8, 64, Fraction(14, 8), False)
    assert verify("multi_ring", 4, rings=[((0, 2, 1, 3), 2)]).rounds == 6


def test_which_algorithms_keep_the_order_of_ranks():
    def ordered(collective, size, root=0):
        return {name for name in names(collective) if verify(name, size, collective=collective, root=root).ordered}

    trees = {"tree", "recursive_doubling", "rabenseifner", "pipelined_tree"}
    assert ordered("allreduce", 7) == trees and ordered("allreduce", 8) == trees | {"double_tree"}
    assert ordered("allreduce", 2) == set(names("allreduce"))
    assert ordered("reduce", 7) == {"tree", "pipelined_tree"} and ordered("reduce", 7, 3) == {"tree"}


def test_order_is_found_in_the_sums_not_in_the_names():
    """Ranks 0 and 2 first: right for every op that commutes, and no other."""
    zero = [Step(recv_from=2, recv=one(0), reduce=True), Step(recv_from=1, recv=one(0), reduce=True),
            Step(1, one(0)), Step(2, one(0))]
    first = [IDLE, Step(0, one(0)), Step(recv_from=0, recv=one(0)), IDLE]
    second = [Step(0, one(0)), IDLE, IDLE, Step(recv_from=0, recv=one(0))]
    assert not prove(given_steps(zero, first, second), Setting(3)).ordered
    zero[0], zero[1], first, second = zero[1], zero[0], [first[1], IDLE, *first[2:]], [IDLE, second[0], *second[2:]]
    assert prove(given_steps(zero, first, second), Setting(3)).ordered


def changed(algorithm, rank, change):
    """Return the algorithm with one rank's list of steps changed."""
    def schedule(r, size):
        steps = list(algorithm.schedule(r, size))
        return change(steps) if r == rank else steps
    return replace(algorithm, schedule=schedule)


def first_step(**fields):
    """Return the ring with fields of rank 1's first step changed."""
    return changed(RING, 1, lambda steps: [steps[0]._replace(**fields), *steps[1:]])


def rejected(algorithm, size, match, rank, step=None, chunk=None):
    with pytest.raises(ScheduleError, match=match) as caught:
        verify(algorithm, size)
    error = caught.value
    assert (error.rank, error.step, error.chunk) == (rank, step, chunk), str(error)


def given_steps(*ranks, chunks=1):
    """Return an algorithm with these steps for each rank."""
    return Algorithm("wrong", "allreduce", lambda rank, size: ranks[rank], lambda setting: chunks)


def test_a_contribution_twice():
    twice = [Step(1 - 0, one(0), 1, one(0), True)] * 2, [Step(0, one(0), 0, one(0), True)] * 2
    rejected(given_steps(*twice), 2, "adds the contribution of ranks 0, 1 a second time", 0, 1, 0)


def test_a_contribution_missing():
    lazy = replace(TREE, schedule=lambda rank, size: [step._replace(reduce=False) if step.reduce and rank == 2 else step
                                                      for step in TREE.schedule(rank, size)])
    rejected(lazy, 4, "ends without the contribution of rank 2", 0, 3 - 2, 0)


def test_a_chunk_that_never_comes():
    alone = replace(find("ring", "allgather"), schedule=lambda rank, size: [])
    rejected(alone, 2, "never gets the chunk", 0, None, 1)


def test_the_wrong_index():
    def other_chunk(steps):
        steps[1] = steps[1]._replace(send=one((steps[1].send[0] + 1) % 4))
        return steps
    rejected(changed(RING, 2, other_chunk), 4, "receives chunk 0 from rank 2, which sends chunk 1", 3, 1, 0)


def test_the_wrong_index_on_all_ranks():
    shifted = replace(RING, schedule=lambda rank, size: [
        step._replace(send=one((step.send[0] + 1) % size), recv=one((step.recv[0] + 1) % size)) if index >= size - 1 else step
        for index, step in enumerate(RING.schedule(rank, size))])
    with pytest.raises(ScheduleError, match="ends without the contribution"):
        verify(shifted, 4)


def test_swapped_order():
    def swap(steps):
        steps[0], steps[1] = steps[1], steps[0]
        return steps
    rejected(changed(RING, 1, swap), 4, "receives chunk 2 from rank 0, which sends chunk 3", 1, 0, 2)


def test_halves_in_the_wrong_order():
    backwards = replace(RING, schedule=lambda rank, size: [*list(RING.schedule(rank, size))[size - 1:],
                                                           *list(RING.schedule(rank, size))[:size - 1]])
    with pytest.raises(ScheduleError):
        verify(backwards, 4)


def test_everybody_sends_before_anybody_receives():
    def split(rank, size):
        for step in RING.schedule(rank, size):
            yield Step(send_to=step.send_to, send=step.send)
            yield Step(recv_from=step.recv_from, recv=step.recv, reduce=step.reduce)
    words = "waits for ever to send chunk 2 to rank 1, which receives nothing in this round"
    rejected(replace(RING, schedule=split), 3, words, 0, 0, 2)


def test_a_receive_that_nobody_sends():
    lonely = [Step(recv_from=1, recv=one(0), reduce=True)], [IDLE]
    rejected(given_steps(*lonely), 2, "waits for ever to receive chunk 0 from rank 1, which sends nothing in this round", 0, 0, 0)


def test_the_wrong_peer():
    rejected(first_step(send_to=3), 4, "waits for ever to send chunk 0 to rank 3, which receives from rank 2", 1, 0, 0)
    rejected(first_step(send_to=1), 4, "sends to rank 1, not a peer", 1, 0, 0)
    rejected(first_step(recv_from=9), 4, "receives from rank 9, not a peer", 1, 0, 3)
    rejected(first_step(recv_from=-4), 4, "receives from rank -4, not a peer", 1, 0, 3)


def test_a_stale_copy_over_a_finished_sum():
    """Rank 2 keeps a partial sum and sends it to rank 0, which has the whole one by then."""
    zero = [Step(recv_from=1, recv=one(0), reduce=True), Step(recv_from=2, recv=one(0), reduce=True), Step(1, one(0)),
            Step(recv_from=2, recv=one(0))]
    first = [Step(0, one(0)), IDLE, Step(recv_from=0, recv=one(0)), IDLE]
    second = [IDLE, Step(0, one(0)), IDLE, Step(0, one(0))]
    rejected(given_steps(zero, first, second), 3, "ends without the contribution of ranks 0, 1", 0, 3, 0)


def test_an_overwrite_while_sending():
    both = [Step(1, one(0), 1, one(0))], [Step(0, one(0), 0, one(0))]
    rejected(given_steps(*both), 2, "overwrites a chunk while it is being sent", 0, 0, 0)


def test_an_unequal_number_of_rounds():
    rejected(changed(RING, 2, lambda steps: steps[:-1]), 4, "has 5 rounds where other ranks have more", 2, 5)
    rejected(changed(RING, 2, lambda steps: [*steps, IDLE]), 4, "has 6 rounds where other ranks have more", 0, 6)


def test_a_step_too_few_on_one_rank():
    rejected(changed(RING, 2, lambda steps: [*steps[:-1], IDLE]), 4, "waits for ever to send chunk", 1, 5, 3)


def test_a_chunk_out_of_range():
    both = [Step(1, one(4), 1, one(4), True)], [Step(0, one(4), 0, one(4), True)]
    rejected(given_steps(*both), 2, "there are 1 chunks", 1, 0, 4)


def test_sending_what_one_does_not_have():
    gather = find("ring", "allgather")
    shifted = replace(gather, schedule=lambda rank, size: [step._replace(send=one((rank + 1) % size), recv=one(rank))
                                                           for step in gather.schedule(rank, size)])
    with pytest.raises(ScheduleError, match="sends a chunk that it does not have"):
        verify(shifted, 3)


def test_bits_that_could_differ():
    """Rank 1 makes (x0 + x1) + (x2 + x3), rank 2 makes ((x2 + x3) + x1) + x0: both whole, but rounded differently."""
    zero = [IDLE, Step(1, one(0)), Step(2, one(0)), IDLE, Step(recv_from=1, recv=one(0))]
    first = [IDLE, Step(2, one(0), 0, one(0), True), IDLE, Step(recv_from=3, recv=one(0), reduce=True), Step(0, one(0))]
    second = [Step(3, one(0), 3, one(0), True), Step(recv_from=1, recv=one(0), reduce=True),
              Step(recv_from=0, recv=one(0), reduce=True), IDLE, Step(3, one(0))]
    third = [Step(2, one(0), 2, one(0), True), IDLE, IDLE, Step(1, one(0)), Step(recv_from=2, recv=one(0))]
    rejected(given_steps(zero, first, second, third), 4, "sums in another order than rank 0", 2, 2, 0)


def test_arguments():
    with pytest.raises(ValueError, match=r"unknown algorithm 'rign' for allreduce .did you mean 'ring'..; known: ring, tree"):
        verify("rign", 4)
    with pytest.raises(ValueError, match="unknown collective 'sum'; known: allreduce"):
        verify("ring", 4, collective="sum")
    for wrong, words in (({"size": 0}, "size 0"), ({"size": 4, "root": 4}, "root 4 is not one of 4 ranks"),
                         ({"size": 4, "pieces": 0}, "pieces 0"), ({"size": 4, "nodes": [0, 1]}, "nodes has 2 entries for 4 ranks"),
                         ({"size": 3, "rings": [((0, 1, 1), 1)]}, "does not go through each of 3 once"),
                         ({"size": 2, "rings": [((0, 1), 0)]}, "weight is 0")):
        with pytest.raises(ValueError, match=words):
            verify("ring", **wrong)


def test_a_chunk_that_is_sent_and_added_to_at_different_places():
    """Later segments would send what earlier ones have changed."""
    crossed = [Step(1, (0, 1), 1, (1, 0), True)], [Step(0, (1, 0), 0, (0, 1), True)]
    rejected(given_steps(*crossed, chunks=2), 2, "sends a chunk and adds to it in one step, at another place", 0, 0, 0)


def test_a_chunk_twice_in_a_message():
    twice = [Step(1, (0, 0), 1, (0, 0), True)], [Step(0, (0, 0), 0, (0, 0), True)]
    rejected(given_steps(*twice), 2, "receives a chunk twice in one message", 0, 0, 0)


def test_a_finished_sum_twice():
    """Who divides it for AVERAGE: who finished it, or who sent the copy?"""
    again = [Step(recv_from=1, recv=one(0), reduce=True), Step(1, one(0)), Step(recv_from=1, recv=one(0))], \
        [Step(0, one(0)), Step(recv_from=0, recv=one(0)), Step(0, one(0))]
    rejected(given_steps(*again), 2, "gets a copy of a finished sum that it has already", 0, 2, 0)


def test_chunks_without_a_peer():
    rejected(given_steps([Step(1, one(0), None, range(5, 6))], [Step(recv_from=0, recv=one(0), reduce=True)]), 2,
             "receives from nobody chunk 5", 0, 0, 5)


def test_what_is_no_step_or_no_chunks():
    rejected(given_steps(["step"], [IDLE]), 2, "yields 'step', which is no Step", 0, 0)
    number = [Step(1, 0)], [Step(recv_from=0, recv=0, reduce=True)]
    rejected(given_steps(*number), 2, "sends to rank 1 chunks 0, neither a range", 0, 0)


def test_ranges_and_tuples_are_the_same_chunks():
    mixed = [Step(1, (0,), 1, range(1), True)], [Step(0, (0,), 0, range(1), True)]
    assert prove(given_steps(*mixed), Setting(2)).rounds == 1


def test_an_algorithm_of_ones_own_needs_a_name_a_collective_and_a_schedule():
    mine = Algorithm("mine", "allreduce", TREE.schedule)
    assert prove(mine, Setting(5)) == prove(TREE, Setting(5))
    assert (mine.rounds(Setting(5)), mine.sent(Setting(5))) == (TREE.rounds(5), TREE.sent(5))
    with pytest.raises(ValueError, match=r"unknown collective 'allreduse' .did you mean 'allreduce'"):
        Algorithm("mine", "allreduse", TREE.schedule)


def test_the_root_of_a_scatter_allgather_only_sends():
    for size in range(2, 20):
        assert all(step.recv_from is None for step in find("scatter_allgather", "broadcast").steps(0, Setting(size)))
