"""Algorithms given as objects, and those that look at nodes: on layouts that this machine does not have."""

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import cuts
from mpiring.algorithms.registry import COLLECTIVES, names
from mpiring.collectives import plan_of
from mpiring.runtime.channel import channel_of

from cases import COMM, RANK, SIZE, bits, on_nodes, result, values
from spmd import drawn

ON_NODES = st.tuples(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), st.integers(0, 2000),
                     st.sampled_from([64, 300, 1 << 20]), st.booleans())


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring", "bidirectional_ring"])
def test_allreduce_on_drawn_nodes(algorithm):
    @drawn(ON_NODES, examples=20)
    def check(case):
        nodes, count, segment, spread = case
        with on_nodes(nodes, segment) as comm:
            channel_of(comm).spread = spread
            found = mpiring.allreduce(values(RANK, count, np.dtype(np.float64)), algorithm=algorithm, comm=comm)
        assert bits(found) == bits(result(MPI.SUM, count, found.dtype))

    check()


@drawn(ON_NODES, examples=20)
def test_the_rings_halves_on_drawn_nodes(case):
    """The places of a ring follow the nodes, but each rank's chunk is its own."""
    nodes, count, segment, spread = case
    mine, expected = values(RANK, count, np.dtype(np.float64)), result(MPI.SUM, count, np.dtype(np.float64))
    own = cuts(count, SIZE)[RANK]
    with on_nodes(nodes, segment) as comm:
        channel_of(comm).spread = spread
        part = mpiring.reduce_scatter(mine, np.zeros(own.stop - own.start), algorithm="ring", comm=comm)
        assert bits(part) == bits(expected[own])
        assert bits(mpiring.allgather(part, np.zeros(count), algorithm="ring", comm=comm)) == bits(expected)
        assert bits(mpiring.allgather(mpiring.reduce_scatter(mine, algorithm="ring", comm=comm).base, algorithm="ring",
                                      comm=comm)) == bits(expected)


def test_the_default_is_auto(monkeypatch):
    """It asks the comm's table, in which the environment has the last word."""
    chosen = {collective: names(collective)[-1] for collective in COLLECTIVES}
    for setting in (chosen, dict.fromkeys(COLLECTIVES, "native"), dict.fromkeys(COLLECTIVES, "shared"), {}):
        monkeypatch.setenv("MPIRING_ALGORITHM", "; ".join(f"{collective}:{name}" for collective, name in setting.items()))
        comm = COMM.Dup()
        for collective in COLLECTIVES:
            array = np.ones(SIZE * 10)
            getattr(mpiring, collective)(array, comm=comm)
            ran = plan_of(collective, array, op=MPI.SUM, comm=comm).algorithm
            if SIZE > 1:
                assert ran == setting.get(collective, ran) and ran in [*names(collective), "shared", "native"]
        comm.Free()


@drawn(st.tuples(st.lists(st.permutations(range(SIZE)), min_size=1, max_size=3),
                 st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(0, 2000)), examples=20)
def test_multi_ring_over_drawn_rings(case):
    orders, weights, count = case
    mine = mpiring.multi_ring_over(zip(orders, weights))
    found = mpiring.allreduce(values(RANK, count, np.dtype(np.float64)), algorithm=mine)
    assert bits(found) == bits(result(MPI.SUM, count, found.dtype))


def test_a_schedule_of_the_callers_own():
    """Everybody sends to rank 0, one after the other, and gets the result back the same way."""
    def star(rank, size):
        for other in range(1, size):
            if rank == 0:
                yield mpiring.Step(recv_from=other, recv=range(1), reduce=True)
            else:
                yield mpiring.Step(send_to=0, send=range(1)) if rank == other else mpiring.IDLE
        for other in range(1, size):
            if rank == 0:
                yield mpiring.Step(send_to=other, send=range(1))
            else:
                yield mpiring.Step(recv_from=0, recv=range(1)) if rank == other else mpiring.IDLE

    mine = mpiring.Algorithm("star", "allreduce", star)
    assert mpiring.verify(mine, SIZE).ordered
    for count in (0, 1, 1000):
        out = mpiring.allreduce(values(RANK, count, np.dtype(int)), algorithm=mine)
        assert (out == sum(values(rank, count, np.dtype(int)) for rank in range(SIZE))).all()
    with pytest.raises(ValueError, match="algorithm 'star' is one for allreduce"):
        mpiring.reduce_scatter(np.ones(8), algorithm=mine)


@pytest.mark.skipif(SIZE < 2, reason="one rank needs no schedule")
def test_a_wrong_schedule_is_not_run():
    """Rank 0 sends, and rank 1 does not receive: without a proof all would keep their own, and nobody would notice."""
    lost = mpiring.Algorithm("lost", "allreduce", lambda rank, size: [mpiring.Step(1, range(1)) if rank == 0 else mpiring.IDLE])
    with pytest.raises(mpiring.ScheduleError, match="rank 0, step 0, chunk 0: waits for ever to send chunk 0 to rank 1"):
        mpiring.allreduce(np.ones(4), algorithm=lost)
    assert (mpiring.allreduce(np.ones(4)) == SIZE).all()


def test_rings_that_do_not_fit():
    with pytest.raises(ValueError, match="does not go through each of 3 once"):
        mpiring.multi_ring_over([((0, 1, 1), 2)])
    with pytest.raises(ValueError, match="there is no ring"):
        mpiring.multi_ring_over([])
    other = mpiring.multi_ring_over([(range(SIZE + 1), 1)])
    with pytest.raises(ValueError, match=f"allreduce on rank {RANK}: the rings go through {SIZE + 1} ranks, not {SIZE}"):
        mpiring.allreduce(np.ones(4), algorithm=other)
