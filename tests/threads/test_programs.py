"""Programs run right where sends are read late: every algorithm, many sizes, segments and layouts. And the ground can tell."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms.cuts import cuts
from mpiring.algorithms.registry import find, names
from mpiring.runtime import program
from mpiring.runtime.giveup import Unexpected

from ranks import run_all

ALLREDUCES = names("allreduce")


def vectors(size, count, dtype=np.float64):
    return [((np.arange(count) * 5 + 3 * rank) % 7).astype(dtype) for rank in range(size)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("segment", [64, 200])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ALLREDUCES)
def test_allreduce(name, size, segment, eager):
    for count in (0, size + 1, 200):
        inputs = vectors(size, count)
        total = sum(inputs)
        more = settings(name, size)
        for out in run_all(find(name), inputs, [np.zeros(count) for _ in range(size)], segment=segment, eager=eager, **more):
            assert (out == total).all()
        for out in run_all(find(name), inputs, segment=segment, eager=eager, window=0, **more):
            assert (out == total).all()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", ALLREDUCES)
def test_views_and_average(name, size):
    for op, expected in ((MPI.SUM, sum(vectors(size, 150))), (mpiring.AVERAGE, sum(vectors(size, 150)) / size)):
        views = [np.zeros((150, 2))[::-1, 1] for _ in range(size)]
        for view, vector in zip(views, vectors(size, 150)):
            view[:] = vector
        others = [np.zeros((30, 5)).T.reshape(5, 30).T.reshape(-1, order="A") for _ in range(size)]
        for out in run_all(find(name), views, others, op=op):
            assert np.allclose(out, expected, rtol=1e-15)
        for out in run_all(find(name), views, op=op):
            assert np.allclose(out, expected, rtol=1e-15)


SETTINGS = {"pipelined_tree": {"pieces": 3}, "double_tree": {"pieces": 2}}
IN_TURN = [False, True]


def settings(name, size):
    """Return what an algorithm may want to know, other than what it assumes."""
    on_nodes = name in ("hierarchical", "scatter_allgather", "reduce_scatter_gather")
    return SETTINGS.get(name, {"nodes": tuple(rank % 2 + rank // 5 for rank in range(size))} if on_nodes else {})


def nodes(size, in_turn):
    """Return ranks in turn on two nodes, or all on one."""
    return {"nodes": tuple(rank % 2 for rank in range(size))} if in_turn else {}


@pytest.mark.parametrize("op", [MPI.SUM, mpiring.AVERAGE])
@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("name", [name for name in ALLREDUCES if find(name).by_node])
def test_allreduce_on_nodes_in_turn(name, size, op):
    for count in (0, size + 1, 400):
        inputs, total = vectors(size, count), sum(vectors(size, count)) / (size if op is mpiring.AVERAGE else 1)
        for out in run_all(find(name), inputs, [np.zeros(count) for _ in range(size)], op, **nodes(size, True)):
            assert np.allclose(out, total, rtol=1e-15)
        for out in run_all(find(name), inputs, op=op, **nodes(size, True)):
            assert np.allclose(out, total, rtol=1e-15)


@pytest.mark.parametrize("in_turn", IN_TURN)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", names("reduce_scatter"))
def test_reduce_scatter(name, size, in_turn):
    more = nodes(size, in_turn)
    for count in (0, 1, size + 1, 400):
        own = cuts(count, size)
        inputs, total = vectors(size, count), sum(vectors(size, count))
        parts = run_all(find(name, "reduce_scatter"), inputs, [np.zeros(c.stop - c.start) for c in own], **more)
        assert all((part == total[c]).all() for part, c in zip(parts, own))
        assert all((a == b).all() for a, b in zip(inputs, vectors(size, count)))
        run_all(find(name, "reduce_scatter"), inputs, **more)
        assert all((vector[c] == total[c]).all() for vector, c in zip(inputs, own))


@pytest.mark.parametrize("in_turn", IN_TURN)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", names("allgather"))
def test_allgather(name, size, in_turn):
    more = nodes(size, in_turn)
    for count in (0, 1, size + 1, 400):
        whole = vectors(1, count)[0]
        parts = [whole[own] for own in cuts(count, size)]
        for result in run_all(find(name, "allgather"), parts, [np.zeros(count) for _ in range(size)], **more):
            assert (result == whole).all()
        inputs = [np.zeros(count) for _ in range(size)]
        for vector, own in zip(inputs, cuts(count, size)):
            vector[own] = whole[own]
        assert all((vector == whole).all() for vector in run_all(find(name, "allgather"), inputs, **more))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", names("broadcast"))
def test_broadcast(name, size):
    for root in {0, size // 2, size - 1}:
        for count in (0, 1, size + 1, 400):
            buffers = [vector.copy() if rank == root else np.zeros(count) for rank, vector in enumerate(vectors(size, count))]
            buffers[root].flags.writeable = False
            for result in run_all(find(name, "broadcast"), buffers, root=root, **settings(name, size)):
                assert (result == vectors(size, count)[root]).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", names("reduce"))
def test_reduce(name, size):
    for root in {0, size // 2, size - 1}:
        for count in (0, 1, size + 1, 400):
            inputs = vectors(size, count)
            run_all(find(name, "reduce"), inputs, root=root, **settings(name, size))
            assert (inputs[root] == sum(vectors(size, count))).all()
            assert all((inputs[rank] == vectors(size, count)[rank]).all() for rank in range(size) if rank != root)
            inputs = vectors(size, count)
            outputs = [np.zeros(count) for _ in range(size)]
            run_all(find(name, "reduce"), inputs, outputs, root=root, **settings(name, size))
            assert (outputs[root] == sum(vectors(size, count))).all()
            run_all(find(name, "reduce"), inputs, outputs, mpiring.AVERAGE, root=root, **settings(name, size))
            assert np.allclose(outputs[root], sum(vectors(size, count)) / size, rtol=1e-15)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", names("alltoall"))
def test_alltoall(name, size, window):
    for each in (0, 1, 3, 70):
        blocks = [[vector[to * each:(to + 1) * each] for vector in vectors(size, size * each)] for to in range(size)]
        inputs, outputs = vectors(size, size * each), [np.zeros(size * each) for _ in range(size)]
        for rank, result in enumerate(run_all(find(name, "alltoall"), inputs, outputs, window=window)):
            assert (result == np.concatenate(blocks[rank])).all()
        for rank, result in enumerate(run_all(find(name, "alltoall"), inputs, window=window)):
            assert (result == np.concatenate(blocks[rank])).all()


@pytest.mark.parametrize("what", ["sends start at once", "receives are posted at once", "slots are shared"])
def test_a_program_without_one_of_its_cares_is_caught(what, monkeypatch):
    if what == "slots are shared":
        monkeypatch.setattr(program._Compiler, "_allocate", lambda self: (
            ([setattr(slot, "index", 0) for slot in self.slots] and [max(slot.length for slot in self.slots)]) or [], []))
    else:
        field = "start_at" if what.startswith("sends") else "post_at"
        original = program.compile_program

        def careless(*args, **options):
            compiled = original(*args, **options)
            for j, transfer in enumerate(compiled.transfers):
                setattr(transfer, field, max(0, j - 80))
                transfer.pack_at = transfer.start_at
            return compiled

        monkeypatch.setattr("ranks.compile_program", careless)
    inputs = vectors(4, 600)
    total = sum(inputs)
    results = run_all(find("ring"), inputs, eager=not what.startswith("receives"))
    assert not all((out == total).all() for out in results)


def test_a_message_that_nobody_receives_is_caught(monkeypatch):
    import ranks

    monkeypatch.setattr(ranks, "PATIENCE", 0.2)
    monkeypatch.setattr("mpiring.runtime.plan.give_up", lambda plan, at, recvs, sends, error: error)
    from dataclasses import replace

    ring = find("ring")
    short = replace(ring, schedule=lambda rank, size: list(ring.schedule(rank, size))[:-1 if rank == 0 else None])
    with pytest.raises((TimeoutError, Unexpected)):
        run_all(short, vectors(3, 10))
