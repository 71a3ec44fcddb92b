"""The cost model gives what a plain clock for each message gives, the closed forms, and the textbook's example."""

from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import ALGORITHMS, find
from mpiring.algorithms.setting import Ring, Setting
from mpiring.algorithms.step import IDLE, Step, floor_log2, one
from mpiring.algorithms.weave import among
from mpiring.analysis.cost import effort, setting_for, simulate
from mpiring.analysis.machines import MACHINES, Level, Machine, ethernet, find_machine, with_ranks_per_node
from mpiring.analysis.rounds import _flow, _packed

MIB = 1 << 20


# ---- an independent clock: loops and dicts, one message at a time

def hull(chunks):
    return (min(chunks), max(chunks)) if len(chunks) else None


def meet(one_set, other):
    a, b = hull(one_set), hull(other)
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def links_of(machine, a, b):
    """Return alpha, and {link: s per byte} of a message from a to b."""
    for depth, level in enumerate(machine.levels):
        group = level.group or 1000
        if a // group != b // group:
            continue
        bus = {} if level.bus is None else {(depth, "bus", a // group): level.bus}
        if level.wires is None:
            out, into = ("out", "in") if level.duplex == "full" else ("port", "port")
            cost = level.beta / level.links
            port = level.ranks_per_port
            pair = {} if level.pair is None else {(depth, "pair", frozenset((a // port, b // port))): level.pair}
            return level.alpha, {(depth, out, a // port): cost, (depth, into, b // port): cost, **bus, **pair}
        ends = a % level.group, b % level.group
        width = level.wires.get(ends) or level.wires.get(ends[::-1])
        if width:
            way = ends if level.duplex == "full" else tuple(sorted(ends))
            return level.alpha, {(depth, a // group, way): level.beta / width, **bus}
    raise AssertionError((a, b))


def union(intervals):
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def by_hand(algorithm, nbytes, machine, setting, dtype="float32", ahead=3):
    n = setting.size
    gamma = machine.gamma.get(dtype, machine.gamma["default"])
    total = nbytes * n if algorithm.collective.name == "alltoall" else nbytes
    sizes = counts(total, algorithm.chunks(setting))
    schedules = [list(algorithm.steps(rank, setting)) for rank in range(n)]
    done = [[] for _ in range(n)]           # of each step of a rank: step, when its send is over, when its receive is
    busy, load, computing, intervals = {}, {}, [0.0] * n, [[] for _ in range(n)]
    for j in range(len(schedules[0])):
        steps = [schedule[j] for schedule in schedules]
        messages = [(rank, step.send_to, sum(sizes[chunk] for chunk in step.send)) for rank, step in enumerate(steps)
                    if step.send_to is not None]
        here, times = {}, {}
        for a, b, size in messages:
            for link in links_of(machine, a, b)[1]:
                here[link] = here.get(link, 0) + size
        for a, b, size in messages:
            alpha, links = links_of(machine, a, b)
            start = max([0.0, *(busy.get(link, 0.0) for link in links)])
            for rank, chunks, receives in ((a, steps[a].send, False), (b, steps[b].recv, True)):
                for index, (step, sent, got) in enumerate(done[rank]):
                    if index < j - ahead or meet(step.recv, chunks):
                        start = max(start, got)
                    if index < j - ahead or (receives and meet(step.send, chunks)):
                        start = max(start, sent)
            times[a, b] = start, start + alpha + max(here[link] * cost for link, cost in links.items()), size
        for (a, b), (_, end, _) in times.items():
            for link in links_of(machine, a, b)[1]:
                busy[link] = max(busy.get(link, 0.0), end)
        for link, size in here.items():
            load[link] = load.get(link, 0) + size
        for rank, step in enumerate(steps):
            sent = got = 0.0
            if step.send_to is not None:
                start, sent, _ = times[rank, step.send_to]
                intervals[rank].append((start, sent))
            if step.recv_from is not None:
                start, got, size = times[step.recv_from, rank]
                intervals[rank].append((start, got))
                if step.reduce:
                    begin = max(got, computing[rank], sent if meet(step.send, step.recv) else 0.0)
                    got = begin + gamma * size
                    if gamma:
                        computing[rank] = got
                        intervals[rank].append((begin, got))
            done[rank].append((step, sent, got))
    seconds = max([0.0, *(time for steps in done for _, sent, got in steps for time in (sent, got))])
    idle = [1 - union(busy) / seconds if seconds else 0.0 for busy in intervals]
    return seconds, len(schedules[0]), max(load.values(), default=0), idle


def same(algorithm, nbytes, machine, setting, ahead=3):
    found = simulate(algorithm, nbytes, machine, setting=setting, ahead=ahead)
    seconds, steps, load, idle = by_hand(algorithm, nbytes, machine, setting, ahead=ahead)
    assert np.isclose(found.seconds, seconds, rtol=1e-12, atol=0)
    assert (found.steps, found.busiest_link_bytes) == (steps, load)
    assert np.allclose(found.idle, idle, atol=1e-9)


def machine(*levels, gamma=0.0, **more):
    return Machine("drawn", levels, {"default": gamma}, 8, **more)


def flat(alpha=2e-6, beta=1e-9, gamma=0.3e-9, **more):
    return machine(Level("flat", None, alpha, beta, **more), gamma=gamma)


def wires(size):
    """Return wires between some pairs of places."""
    return {(a, b): 1 + (a + b) % 3 for a in range(size) for b in range(a + 1, size) if (a * b + a + b) % 3}


@st.composite
def machines(draw):
    """Draw a machine: a flat one, or nodes with or without wires, with NICs of their own or shared, buses, pairs, half duplex."""
    time = st.sampled_from([0.7e-9, 1e-9, 2.3e-9])
    gamma = draw(st.sampled_from([0.0, 0.2e-9, 3.1e-9]))
    duplex, bus = st.sampled_from(["full", "half"]), st.sampled_from([None, 0.5e-9, 1.1e-9])
    alpha = st.sampled_from([0.0, 1.3e-6, 20e-6])
    group = draw(st.sampled_from([None, 2, 3, 4]))
    outer = Level("out", None, draw(alpha), draw(time), draw(st.integers(1, 3)), draw(st.sampled_from([1, group or 1, 2])),
                  draw(duplex), bus=draw(bus), pair=draw(st.sampled_from([None, 0.6e-9, 1.5e-9])))
    if group is None:
        return machine(outer, gamma=gamma)
    joined = wires(group) if draw(st.booleans()) else None
    return machine(Level("in", group, draw(alpha), draw(time), draw(st.integers(1, 2)), 1, draw(duplex), joined, draw(bus)), outer,
                   gamma=gamma)


@st.composite
def drawn_settings(draw):
    size = draw(st.integers(1, 9))
    nodes = tuple(draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    rings = tuple(Ring(tuple(draw(st.permutations(range(size)))), draw(st.integers(1, 3))) for _ in range(draw(st.integers(0, 2))))
    return Setting(size, draw(st.integers(0, size - 1)), draw(st.integers(1, 6)), nodes, rings)


@pytest.mark.parametrize("collective, name", ALGORITHMS)
@settings(max_examples=25, deadline=None)
@given(nbytes=st.sampled_from([0, 3, 1000, 123457, 4 * MIB]), machine=machines(), setting=drawn_settings(), ahead=st.integers(0, 4))
def test_the_same_as_a_plain_clock(collective, name, nbytes, machine, setting, ahead):
    same(find(name, collective), nbytes, machine, setting, ahead)


@pytest.mark.parametrize("name", MACHINES)
def test_the_same_on_ready_made_machines(name):
    for algorithm in ALGORITHMS.values():
        for ranks in (5, 8) if name == "pcie" or name == "p3.16xlarge" else (6, 17):
            if ranks > (MACHINES[name].levels[-1].group or 99):
                continue
            same(algorithm, 1 * MIB + 5, MACHINES[name], setting_for(algorithm, MIB, MACHINES[name], ranks))


# ---- closed forms on a flat machine: a full-duplex port for each rank

A, B, G = 5e-6, 1e-9, 0.25e-9
FLAT = flat(A, B, G)


def price(name, ranks, nbytes, machine=FLAT, collective="allreduce", **more):
    return simulate(name, nbytes, machine, setting=Setting(ranks, **more), collective=collective).seconds


def is_about(found, wanted):
    assert np.isclose(found, wanted, rtol=1e-12, atol=0), (found, wanted)


SIZES = [2, 3, 4, 5, 7, 8, 12, 16, 32]


@pytest.mark.parametrize("n", SIZES)
def test_closed_forms_for_any_number_of_ranks(n):
    m = n * (n - 1) * 24 * 1000                       # whole chunks, whatever they are cut into
    lg, chunk = ceil(log2(n)), m / n
    half = (n - 1) * (A + chunk * B)
    is_about(price("ring", n, m), 2 * half + (n - 1) * chunk * G)
    is_about(price("ring", n, m, collective="reduce_scatter"), half + (n - 1) * chunk * G)
    is_about(price("ring", n, m, collective="allgather"), half)
    is_about(price("bruck", n, m, collective="allgather"), lg * A + (n - 1) * chunk * B)
    is_about(price("tree", n, m), lg * (2 * A + 2 * m * B + m * G))
    is_about(price("tree", n, m, collective="reduce"), lg * (A + m * (B + G)))
    is_about(price("tree", n, m, collective="broadcast"), lg * (A + m * B))
    is_about(price("pairwise", n, m, collective="alltoall"), (n - 1 + n % 2) * (A + chunk * B))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_closed_forms_for_powers_of_two(n):
    m, lg, share = n * 48000, floor_log2(n), (n - 1) / n
    is_about(price("recursive_doubling", n, m), lg * (A + m * (B + G)))
    is_about(price("rabenseifner", n, m), 2 * lg * A + share * m * (2 * B + G))
    is_about(price("bruck", n, m), 2 * lg * A + share * m * (2 * B + G))
    is_about(price("bruck", n, m, collective="reduce_scatter"), lg * A + share * m * (B + G))
    is_about(price("bruck", n, m, collective="alltoall"), lg * (A + m / 2 * B))
    ring = (n - 1) * (A + m / n * B)
    is_about(price("scatter_allgather", n, m, collective="broadcast"), lg * A + share * m * B + ring)
    is_about(price("reduce_scatter_gather", n, m, collective="reduce"), ring + share * m * G + lg * A + share * m * B)


@pytest.mark.parametrize("n, extra", [(3, 1), (5, 1), (6, 2), (7, 3), (12, 4)])
def test_ranks_beyond_a_power_of_two_add_the_vector_there_and_back(n, extra):
    m, lg = 48000, floor_log2(n)
    there_and_back = 2 * (A + m * B) + m * G
    is_about(price("recursive_doubling", n, m), lg * (A + m * (B + G)) + there_and_back)


@pytest.mark.parametrize("hosts, lanes", [(2, 2), (3, 2), (2, 4), (4, 4)])
def test_the_hierarchy_is_three_rings(hosts, lanes):
    n, m = hosts * lanes, hosts * lanes * 6000
    nodes = tuple(rank // lanes for rank in range(n))
    inside, between = m / lanes, m / n
    is_about(price("hierarchical", n, m, nodes=nodes), 2 * (lanes - 1) * (A + inside * B) + (lanes - 1) * inside * G
             + 2 * (hosts - 1) * (A + between * B) + (hosts - 1) * between * G)


@pytest.mark.parametrize("n", [3, 4, 8, 13])
def test_rings_that_take_turns_hide_their_sums(n):
    m = n * 2 * 6000
    is_about(price("bidirectional_ring", n, m), 4 * (n - 1) * (A + m / (2 * n) * B))
    is_about(price("multi_ring", n, m), 4 * (n - 1) * (A + m / (2 * n) * B))


@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize("trees", [1, 2])
def test_pipelines_take_no_longer_than_their_rounds(pieces, trees):
    """Each of 4(h + k) rounds carries one piece, and a sum: the bound that the best number of pieces is made for."""
    name = ("pipelined_tree", "double_tree")[trees - 1]
    for n in (2, 5, 8, 33):
        m = 48000
        piece = m / pieces / trees
        rounds = 4 * (floor_log2(n - 1) + pieces)
        found = price(name, n, m, pieces=pieces)
        assert 0.25 * rounds * (A + piece * B) <= found <= rounds * (A + piece * (B + G)) * (1 + 1e-12)


@pytest.mark.parametrize("pieces", [1, 2, 8])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_closed_forms_of_pipelines_for_powers_of_two(n, pieces):
    """All but the first of 2(h + k) rounds of each half carry a message that the next one waits for."""
    m, rounds = 48000, 2 * (floor_log2(n - 1) + pieces) - 1
    rounds, free = (rounds if n > 2 else pieces), flat(A, B, 0)
    for collective in ("broadcast", "reduce"):
        is_about(price("pipelined_tree", n, m, free, collective, pieces=pieces), rounds * (A + m / pieces * B))
    is_about(price("pipelined_tree", n, m, free, pieces=pieces), 2 * rounds * (A + m / pieces * B))
    if n > 2:
        is_about(price("double_tree", n, m, free, pieces=pieces), 2 * rounds * (A + m / pieces / 2 * B))


def test_a_pipeline_of_two_ranks_is_a_message_for_each_piece():
    m, k = 48000, 8
    is_about(price("pipelined_tree", 2, m, pieces=k, collective="broadcast"), k * (A + m / k * B))
    is_about(price("pipelined_tree", 2, m, pieces=k, collective="reduce"), k * (A + m / k * B) + m / k * G)


# ---- machines

def test_the_textbook_and_the_two_rings_of_a_p3():
    p3 = find_machine("p3.16xlarge")
    assert round(p3.textbook(160_000_000) * 1e3, 2) == 5.93
    free = replace(p3, levels=tuple(replace(level, alpha=0.0) for level in p3.levels))
    assert round(simulate("multi_ring", 160_000_000, free).seconds * 1e3, 3) == 5.185
    found = simulate("multi_ring", 160_000_000, p3)
    assert abs(found.seconds - 14 * 3.4e-6 - 5.185185e-3) < 1e-8 and found.steps == 28
    assert found.busiest_link_bytes == pytest.approx(2 * 7 / 8 * 160e6 * 2 / 3, abs=28)      # two thirds: the doubled ring's
    assert max(found.idle) < 1e-4


def in_turn(algorithm, ranks, per_node):
    """Return the algorithm for ranks dealt to nodes in turn, by their places on a machine, which has them node by node."""
    nodes = ranks // per_node
    dealt = Setting(ranks, nodes=tuple(rank % nodes for rank in range(ranks)))
    place = [rank % nodes * per_node + rank // nodes for rank in range(ranks)]

    def schedule(at, size):
        return among(place, algorithm.steps(place.index(at), dealt))
    return replace(algorithm, schedule=schedule, cyclic=False, by_node=False)


@pytest.mark.parametrize("collective, name", [key for key, algorithm in ALGORITHMS.items() if algorithm.by_node])
def test_a_ring_costs_the_same_however_the_ranks_are_dealt_to_nodes(collective, name):
    algorithm, hosts = find(name, collective), ethernet(10, 15e-6, 4)
    for nbytes in (0, 12 * MIB):
        block = simulate(algorithm, nbytes, hosts, 12)
        turn = simulate(in_turn(algorithm, 12, 4), nbytes, hosts, 12)
        assert (turn.seconds, turn.steps, turn.busiest_link_bytes) == (block.seconds, block.steps, block.busiest_link_bytes)
    by_rank = simulate(in_turn(replace(algorithm, by_node=False), 12, 4), 12 * MIB, hosts, 12)
    assert by_rank.seconds > 1.5 * block.seconds


def everybody_sends(ranks, apart):
    """Return an algorithm of one round: each rank of the first half sends the vector to the one `apart` ranks further."""
    def schedule(rank, size):
        if rank < ranks:
            return [Step(send_to=rank + apart, send=one(0))]
        return [Step(recv_from=rank - apart, recv=one(0)) if apart <= rank < apart + ranks else IDLE]
    return replace(find("tree", "broadcast"), name="made", schedule=schedule, needs=())


def test_eight_ranks_that_share_a_nic_take_eight_times_as_long_as_one():
    hosts = replace(ethernet(10, 15e-6, 8), levels=tuple(replace(level, alpha=0.0) for level in ethernet(10, 15e-6, 8).levels))
    one_rank = simulate(everybody_sends(1, 8), MIB, hosts, 16)
    all_ranks = simulate(everybody_sends(8, 8), MIB, hosts, 16)
    is_about(all_ranks.seconds, 8 * one_rank.seconds)
    assert (one_rank.busiest_link_bytes, all_ranks.busiest_link_bytes) == (MIB, 8 * MIB)
    assert one_rank.idle.tolist() == [0, *[1] * 7, 0, *[1] * 7]
    is_about(*(simulate(everybody_sends(ranks, 8), MIB, "dgx-h100", 16).seconds for ranks in (1, 8)))       # a NIC for each


def test_half_duplex_doubles_a_ring():
    is_about(price("ring", 8, MIB, flat(0, B, 0, duplex="half")), 2 * price("ring", 8, MIB, flat(0, B, 0)))


def test_striped_links_and_a_bus():
    is_about(price("ring", 8, MIB, flat(0, B, 0, links=4)), price("ring", 8, MIB, flat(0, B, 0)) / 4)
    is_about(price("ring", 8, MIB, flat(0, B, 0, bus=B)), 8 * price("ring", 8, MIB, flat(0, B, 0)))
    is_about(price("ring", 8, MIB, flat(0, B, 0, bus=B / 100)), price("ring", 8, MIB, flat(0, B, 0)))


def test_a_slow_dtype_costs_its_gamma():
    slow = replace(FLAT, gamma={"default": G, "float16": 10 * G})
    found = [simulate("ring", 8000, slow, 8, dtype=dtype).seconds for dtype in ("float32", "float16")]
    is_about(found[1] - found[0], 7 * 1000 * 9 * G)


def test_a_chunk_of_no_bytes_costs_alpha():
    assert price("ring", 8, 0) == pytest.approx(14 * A)
    assert simulate("ring", 0, FLAT, 8).busiest_link_bytes == 0
    found = simulate("ring", 100, FLAT, 1)
    assert (found.seconds, found.steps, found.idle.tolist(), found.busiest_link_bytes) == (0, 0, [0], 0)


def test_a_trace_has_every_message():
    found = simulate("ring", 8000, FLAT, 4, trace=True)
    assert len(found.messages) == 24 and {message.nbytes for message in found.messages} == {2000}
    first = found.messages[0]
    assert (first.step, first.sender, first.receiver, first.start) == (0, 0, 1, 0)
    is_about(first.end, A + 2000 * B)
    is_about(first.over, A + 2000 * (B + G))
    assert max(message.over for message in found.messages) == found.seconds
    assert simulate("ring", 8000, FLAT, 4).messages == []


@pytest.mark.parametrize("collective, name", [key for key, algorithm in ALGORITHMS.items() if algorithm.pieces])
def test_a_pipeline_spread_from_one_piece_is_its_schedule(collective, name):
    algorithm = find(name, collective)
    for size in [*range(2, 20), 33]:
        for setting in (Setting(size, root, pieces) for root in (0, size - 1) for pieces in (1, 2, 3, 7)):
            for spread, plain in zip(_flow(algorithm, setting), _packed(algorithm, setting), strict=True):
                for one_part, other in zip(spread[:3], plain[:3]):
                    assert all((a == b).all() for a, b in zip(one_part[:2], other[:2]))
                assert (spread[3] == plain[3]).all()


def counting(algorithm):
    """Return the algorithm, and the list of ranks whose schedules are asked for."""
    asked = []

    def schedule(rank, size, *needs):
        asked.append(rank)
        return algorithm.schedule(rank, size, *needs)
    return replace(algorithm, schedule=schedule), asked


def test_a_cyclic_algorithm_is_asked_for_rank_0_alone():
    algorithm, asked = counting(find("ring"))
    simulate(algorithm, MIB, "dgx-h100", 64)
    assert asked == [0]
    simulate(algorithm, MIB, "dgx-h100", setting=Setting(8, root=3))
    assert len(asked) == 1 + 8                       # another root turns ranks, not chunks
    simulate(algorithm, MIB, "dgx-h100", setting=Setting(8, nodes=(0, 1) * 4))
    assert len(asked) == 1 + 8 + 8                   # so do nodes whose ranks do not follow one another


def test_the_effort_of_what_turns_is_less():
    ring, bruck, in_turn = find("ring"), find("bruck"), Setting(64, nodes=(0, 1) * 32)
    assert effort(ring, in_turn) == 15 * effort(ring, Setting(64, nodes=(0,) * 32 + (1,) * 32))
    assert effort(bruck, in_turn) == effort(bruck, Setting(64))


def test_settings_are_made_for_the_machine():
    hosts = ethernet(10, 15e-6, 4)
    assert setting_for(find("hierarchical"), MIB, hosts, 8).nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert len(setting_for(find("multi_ring"), MIB, find_machine("p3.16xlarge"), 8).rings) == 2
    assert setting_for(find("multi_ring"), MIB, find_machine("p3.16xlarge"), 16).rings == ()
    flow = find("pipelined_tree")
    assert setting_for(flow, MIB, hosts, 8).pieces == flow.pieces(8, MIB, hosts.latency_bytes(8)) > 1
    assert simulate("hierarchical", MIB, with_ranks_per_node(hosts, 2), 8).steps == 2 * 1 + 2 * 3


@pytest.mark.parametrize("call, match", [
    (lambda: simulate("rign", 8, FLAT), "unknown algorithm 'rign'"),
    (lambda: simulate("ring", 8, "dgx9"), "unknown machine 'dgx9'.*did you mean 'dgx2'"),
    (lambda: simulate("ring", -8, FLAT), "below 0"),
    (lambda: simulate("ring", 8, FLAT, 0), "size 0"),
    (lambda: simulate("ring", 8, FLAT, 4, setting=Setting(8)), "ranks is 4, but the setting is for 8"),
    (lambda: simulate("ring", 8, "pcie", 9), "machine pcie: no path between rank 0 and rank 8: its outermost level joins 8 ranks"),
    (lambda: simulate("ring", 8, machine(Level("wires", 4, A, B, wires={(0, 1): 1, (1, 2): 1})), 3),
     "no path between rank 0 and rank 2: its outermost level joins only places with a wire"),
])
def test_what_cannot_be_is_said(call, match):
    with pytest.raises(ValueError, match=match):
        call()
