"""Sets of ranks: what they know, static and dynamic ones, and operations within them."""

import copy
import pickle

import pytest
import torch
from mpi4py import MPI

import mpiring.torch as hvd
from mpiring.torch import process_sets

from ranks import COMM, EVERYONE, LAST, RANK, SIZE, all_attempt

needs_peers = pytest.mark.skipif(SIZE < 2, reason="one rank has no subset")

EVENS, REST = [*EVERYONE][::2], [*EVERYONE][SIZE // 2:]


@pytest.fixture(autouse=True)
def ended():
    """Begin with nothing, and leave nothing."""
    assert not hvd.is_initialized()
    yield
    COMM.Barrier()
    hvd.shutdown()


def total(process_set):
    return hvd.allreduce(torch.tensor(RANK), op=hvd.Sum, process_set=process_set).item()


def test_all_ranks():
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks) == (0, [])
    hvd.init()
    assert (everyone.process_set_id, everyone.ranks) == (0, [*EVERYONE])
    assert (everyone.size(), everyone.rank(), everyone.included()) == (SIZE, RANK, True)
    assert total(everyone) == sum(EVERYONE)
    hvd.shutdown()
    assert everyone.process_set_id == 0
    with pytest.raises(ValueError, match="not initialized"):
        everyone.size()


@needs_peers
def test_static_sets():
    evens, rest = hvd.ProcessSet(EVENS[::-1]), hvd.ProcessSet(REST)
    assert evens.process_set_id is None and evens.ranks == EVENS
    hvd.init(process_sets=[evens, rest])
    assert (evens.process_set_id, rest.process_set_id) == (1, 2)
    for made, ranks in ((evens, EVENS), (rest, REST)):
        assert made.size() == len(ranks) and made.included() is (RANK in ranks)
        if RANK in ranks:
            assert made.rank() == ranks.index(RANK) and total(made) == sum(ranks)
        else:
            with pytest.raises(ValueError, match=f"rank {RANK} is not part of ProcessSet"):
                made.rank()
    for call in (hvd.add_process_set, hvd.remove_process_set):
        with pytest.raises(ValueError, match="dynamic"):
            call(evens)
    hvd.shutdown()
    assert evens.process_set_id is None and evens.ranks == EVENS
    hvd.init(process_sets=[evens])
    assert evens.process_set_id == 1


@needs_peers
def test_dynamic_sets():
    hvd.init(process_sets="dynamic")
    evens = hvd.add_process_set(EVENS)
    last = hvd.ProcessSet([LAST])
    assert hvd.add_process_set(last) is last
    assert (evens.process_set_id, last.process_set_id) == (1, 2)
    if evens.included():
        assert total(evens) == sum(EVENS)
    assert hvd.remove_process_set(evens) is True
    assert evens.process_set_id is None
    assert hvd.remove_process_set(evens) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    with pytest.raises(ValueError, match="is not known"):
        hvd.allreduce(torch.ones(2), process_set=evens)
    with pytest.raises(ValueError, match="is not known"):
        evens.size()
    again = hvd.add_process_set(evens)
    assert again is evens and evens.process_set_id == 3
    if last.included():
        assert total(last) == LAST


def test_the_environment_allows_dynamic_sets(monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    if SIZE > 1:
        hvd.add_process_set([0])


@needs_peers
def test_sets_of_communicators():
    """Every rank passes its own part of the whole; the others' parts are known too."""
    comm = COMM.Split(RANK % 2, RANK)
    mine = hvd.ProcessSet(comm)
    assert (mine.ranks, mine.mpi_comm) == (None, comm)
    hvd.init(COMM, process_sets=[mine])
    part = [rank for rank in EVERYONE if rank % 2 == RANK % 2]
    assert mine.ranks == part and mine.included() and total(mine) == sum(part)
    assert COMM.allgather(mine.process_set_id) == [1 + rank % 2 for rank in EVERYONE]
    comm.Free()


@needs_peers
def test_ranks_are_those_of_the_comm():
    comm = COMM.Split(0, -RANK)
    first = hvd.ProcessSet([0])
    hvd.init(comm, process_sets=[first])
    assert first.included() == (RANK == LAST)
    comm.Free()


def test_comms_need_a_comm():
    with pytest.raises(NotImplementedError, match="process sets of communicators"):
        hvd.init(process_sets=[hvd.ProcessSet(MPI.COMM_SELF)])
    hvd.init(process_sets="dynamic")
    with pytest.raises(NotImplementedError, match="lists of ranks"):
        hvd.add_process_set(hvd.ProcessSet(MPI.COMM_SELF))


@pytest.mark.parametrize("ranks", [5, None, ["0"], [0.5]], ids=str)
def test_what_is_no_set(ranks):
    with pytest.raises(ValueError, match="neither a list of ranks nor an mpi4py Comm"):
        hvd.ProcessSet(ranks)


@pytest.mark.parametrize("wrong", ["static", [[0]], 5, [None]], ids=str)
def test_what_init_does_not_take(wrong):
    with pytest.raises(ValueError, match='neither a list of ProcessSet nor "dynamic"'):
        hvd.init(process_sets=wrong)
    assert not hvd.is_initialized()


@pytest.mark.parametrize("ranks", [[], [SIZE], [-1], [0, 0], [*EVERYONE]], ids=str)
def test_ranks_that_make_no_set(ranks):
    """None, one that does not exist, one twice, all: that set exists already."""
    with pytest.raises(ValueError, match="ranks"):
        hvd.init(process_sets=[hvd.ProcessSet(ranks)])
    assert not hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match="ranks"):
        hvd.add_process_set(ranks)
    assert total(hvd.global_process_set) == sum(EVERYONE)


@needs_peers
def test_a_set_twice():
    with pytest.raises(ValueError, match="exists already, with the number 1"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    hvd.init(process_sets="dynamic")
    made = hvd.add_process_set([0])
    for again in ([0], hvd.ProcessSet([0])):
        with pytest.raises(ValueError, match="exists already, with the number 1"):
            hvd.add_process_set(again)
    with pytest.raises(ValueError, match="is known already"):
        hvd.add_process_set(made)


@needs_peers
def test_ranks_disagree_about_a_set():
    hvd.init(process_sets="dynamic")
    for kind, text in all_attempt(lambda: hvd.add_process_set([0] if RANK else [LAST])):
        assert kind == "HorovodInternalError" and "ranks disagree" in text
    assert total(hvd.global_process_set) == sum(EVERYONE)


@needs_peers
def test_who_is_not_part_of_it():
    hvd.init(process_sets="dynamic")
    alone = hvd.add_process_set([LAST])
    calls = [lambda: hvd.allreduce(torch.ones(2), process_set=alone), lambda: hvd.allreduce_(torch.ones(2), process_set=alone),
             lambda: hvd.grouped_allreduce([torch.ones(2)], process_set=alone), lambda: hvd.barrier(alone),
             lambda: hvd.allgather(torch.ones(2), process_set=alone), lambda: hvd.broadcast(torch.ones(2), LAST, process_set=alone),
             lambda: hvd.alltoall(torch.ones(2), process_set=alone), lambda: hvd.reducescatter(torch.ones(2), process_set=alone),
             lambda: hvd.grouped_allgather([torch.ones(2)], process_set=alone),
             lambda: hvd.grouped_reducescatter([torch.ones(2)], process_set=alone),
             lambda: hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "x", hvd.Sum, process_set=alone)()]
    for call in calls:
        if RANK == LAST:
            call()
        else:
            with pytest.raises(ValueError, match="this rank is not part of ProcessSet"):
                call()
    if RANK != LAST:
        with pytest.raises(ValueError, match=f"call on rank {RANK}: this rank is not part of"):
            process_sets.within(alone, "call")
    with pytest.raises(TypeError, match="process_set is of type list"):
        process_sets.within([0], "call")


@needs_peers
def test_operations_in_sets():
    """Names and unnamed ones of each set are its own; roots are ranks among all."""
    hvd.init(process_sets="dynamic")
    sets = [(hvd.add_process_set(ranks), ranks) for ranks in dict.fromkeys([tuple(EVENS), tuple(REST), (LAST,)])
            if len(ranks) < SIZE]
    mine = [(each, ranks) for each, ranks in sets if RANK in ranks]
    handles = [hvd.allreduce_async(torch.tensor(float(RANK)), name="x", op=hvd.Sum, process_set=each) for each, _ in mine]
    everyone = hvd.allreduce_async(torch.tensor(float(RANK)), name="x", op=hvd.Sum)
    for handle, (each, ranks) in zip(handles, mine):
        assert hvd.synchronize(handle) == sum(ranks)
        assert hvd.allgather(torch.tensor([RANK]), process_set=each).tolist() == [*ranks]
        assert hvd.broadcast(torch.tensor(RANK), ranks[-1], process_set=each) == ranks[-1]
        assert hvd.alltoall(torch.arange(len(ranks)), process_set=each).tolist() == [ranks.index(RANK)] * len(ranks)
        assert hvd.reducescatter(torch.ones(len(ranks)), op=hvd.Sum, process_set=each).tolist() == [len(ranks)]
        assert hvd.allreduce(torch.ones(1), process_set=each) == 1
        hvd.barrier(each)
        absent = next(rank for rank in EVERYONE if rank not in ranks)
        with pytest.raises(ValueError, match=f"root {absent} is not one of the ranks"):
            hvd.broadcast(torch.ones(1), absent, process_set=each)
    assert hvd.synchronize(everyone) == sum(EVERYONE)


@needs_peers
def test_copies_are_the_same_set():
    """A model that knows its set may be copied, pickled and sent."""
    hvd.init(process_sets="dynamic")
    made = hvd.add_process_set([LAST])
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert twin is not made and twin.size() == 1 and twin.included() == (RANK == LAST)
        if twin.included():
            assert total(twin) == LAST
    twin = copy.copy(made)
    assert hvd.remove_process_set(twin) is True
    assert made.process_set_id is None and twin.process_set_id is None
    with pytest.raises(ValueError, match="is not known"):
        made.size()


def test_what_it_says_of_itself():
    assert repr(hvd.ProcessSet([2, 1])) == "ProcessSet(process_set_id=None, ranks=[1, 2], mpi_comm=None)"


@needs_peers
def test_what_is_pending_in_a_removed_set():
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([0, LAST]) if SIZE > 2 else hvd.add_process_set([0])
    handle = hvd.allreduce_async(torch.ones(2), process_set=pair) if RANK == 0 else None
    hvd.remove_process_set(pair)
    if RANK == 0 and SIZE > 2:
        with pytest.raises(hvd.HorovodInternalError, match="shut the engine down"):
            hvd.synchronize(handle)
