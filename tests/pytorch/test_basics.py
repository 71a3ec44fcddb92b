"""Begin, end, and who is where."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import mpiring.torch as hvd
from mpiring.torch import basics, mpi_ops
from mpiring.torch.exceptions import HorovodInternalError, translated

from ranks import COMM, EVERYONE, LAST, RANK, SIZE, all_attempt, attempt

needs_peers = pytest.mark.skipif(SIZE < 2, reason="one rank waits for nobody")


@pytest.fixture(autouse=True)
def ended():
    """Begin with nothing, and leave nothing."""
    assert not hvd.is_initialized()
    yield
    hvd.shutdown()


def works():
    return (hvd.allreduce(torch.ones(3), op=hvd.Sum) == hvd.size()).all()


QUERIES = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "mpi_threads_supported", "stop_timeline"]

CALLS = [lambda: hvd.start_timeline("x.json"), lambda: hvd.allreduce(torch.ones(2)), lambda: hvd.allreduce_async_(torch.ones(2)),
         lambda: hvd.allgather(torch.ones(2)), lambda: hvd.broadcast_(torch.ones(2), 0), lambda: hvd.alltoall(torch.ones(SIZE)),
         lambda: hvd.reducescatter(torch.ones(2)), lambda: hvd.grouped_allreduce([torch.ones(2)]), hvd.join, hvd.barrier,
         lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.ProcessSet([0])), mpi_ops.is_homogeneous,
         lambda: hvd.global_process_set.size(), lambda: hvd.ProcessSet([0]).rank(), basics.engine]


@pytest.mark.parametrize("when", ["before", "after"])
def test_outside_of_init_and_shutdown(when):
    if when == "after":
        hvd.init()
        hvd.shutdown()
    for call in [*(getattr(hvd, name) for name in QUERIES), *CALLS]:
        with pytest.raises(ValueError, match=r"not initialized; use hvd\.init\(\)"):
            call()
    assert hvd.is_initialized() is False
    hvd.shutdown()


def test_who_is_where():
    hvd.init()
    assert hvd.is_initialized() is True
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE), "the tests run on one node"
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert mpi_ops.is_homogeneous() is True
    assert all(type(getattr(hvd, name)()) is int for name in QUERIES[:6])


def test_places_on_several_nodes(monkeypatch):
    """Ranks 0 and 1 on one node, the others on another one."""
    class Comm:
        rank = RANK

        def Split_type(self, kind, key):
            assert kind == MPI.COMM_TYPE_SHARED
            return COMM.Split(RANK // 2, key)

        Split, allgather = COMM.Split, COMM.allgather

    place = basics._place_in(Comm())
    nodes = [[rank for rank in EVERYONE if rank // 2 == node] for node in range((SIZE + 1) // 2)]
    assert (place.local_rank, place.local_size) == (RANK % 2, len(nodes[RANK // 2]))
    assert (place.cross_rank, place.cross_size) == (RANK // 2, sum(len(node) > RANK % 2 for node in nodes))
    assert place.homogeneous == (SIZE in (1, 2, 4))


def test_what_is_built():
    for name, expected in {"mpi_enabled": True, "mpi_built": True, "gloo_enabled": False, "gloo_built": False, "ddl_built": False,
                           "ccl_built": False, "rocm_built": False, "nccl_built": 0}.items():
        found = getattr(hvd, name)()
        assert found == expected and type(found) is type(expected), name
    assert type(hvd.cuda_built()) is bool
    hvd.init()
    assert hvd.mpi_threads_supported() is (MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def test_init_twice_and_again():
    hvd.init()
    first = basics.engine()
    hvd.init()
    assert basics.engine() is first
    for _ in range(3):
        assert works()
        hvd.shutdown()
        assert first.closed
        hvd.init()
    assert basics.engine() is not first and works()


@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
@needs_peers
def test_what_is_pending_fails(last):
    """A rank that shuts down fails what waits for it, on the other ranks and on its own; then all can begin again."""
    who = LAST if last else 0
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), name=f"rank {RANK}'s own")
    rows = hvd.grouped_allgather_async([torch.ones(3)] * 2, name=f"rank {RANK}'s own")
    if RANK == who:
        hvd.shutdown()
    for pending in (handle, rows):
        with pytest.raises(hvd.HorovodInternalError, match=f"rank {who} shut the engine down"):
            hvd.synchronize(pending)
        assert hvd.synchronize(pending) is None
    if RANK != who:
        with pytest.raises(hvd.HorovodInternalError, match=f"rank {who} shut the engine down"):
            hvd.allreduce(torch.ones(3))
        assert hvd.is_initialized()
    COMM.Barrier()
    hvd.shutdown()
    hvd.init()
    assert works()


def test_results_outlive_the_engine():
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    hvd.barrier()
    hvd.shutdown()
    assert hvd.poll(handle) and (hvd.synchronize(handle) == SIZE).all()


# ----------------------------------------------------------------- which ranks

def test_a_communicator():
    """It is duplicated, so it may be freed; ranks are its own."""
    comm = COMM.Split(RANK % 2, -RANK)
    size, rank = comm.size, comm.rank
    hvd.init(comm)
    comm.Free()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allgather(torch.tensor([RANK])).tolist() == [other for other in reversed(EVERYONE) if other % 2 == RANK % 2]


def test_some_ranks():
    """Only these call init; in the order given."""
    some = [*reversed(EVERYONE)][:max(1, SIZE - 1)]
    if RANK in some:
        hvd.init(some)
        assert (hvd.rank(), hvd.size()) == (some.index(RANK), len(some)) and works()
    assert hvd.is_initialized() == (RANK in some)


def test_no_ranks_are_all():
    hvd.init([])
    assert hvd.size() == SIZE


@pytest.mark.parametrize("comm, match", [
    ("x", "comm"), (5, "comm is neither a list"), ([0, 0], "comm"), ([SIZE], "comm"), ([-1], "comm"), ([0.0], "comm"),
    ([RANK + 1 if RANK < LAST else 0] if SIZE > 1 else [1], "comm"), (MPI.COMM_NULL, "COMM_NULL")], ids=str)
def test_wrong_comms(comm, match):
    with pytest.raises(ValueError, match=match):
        hvd.init(comm)
    assert not hvd.is_initialized()
    hvd.init()
    assert works()


def test_a_wrong_setting(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "many")
    with pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD is 'many'"):
        hvd.init()
    assert not hvd.is_initialized()


# ----------------------------------------------------------------- timeline

def test_timeline(tmp_path):
    hvd.init()
    folder = Path(COMM.bcast(str(tmp_path)))
    hvd.start_timeline(str(folder / "trace.json"), mark_cycles=True)
    with pytest.raises(ValueError, match="being written already"):
        hvd.start_timeline(str(folder / "other.json"))
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.stop_timeline()
    hvd.stop_timeline()
    text = (folder / f"trace.rank{RANK}.json").read_text()
    assert "allreduce.seen" in text and json.loads(text)


def test_a_timeline_of_the_environment_is_fixed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "fixed.json"))
    hvd.init()
    with pytest.raises(ValueError, match="being written already"):
        hvd.start_timeline(str(tmp_path / "other.json"))
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    hvd.start_timeline(str(tmp_path / "other.json"))


# ----------------------------------------------------------------- errors and processes

def test_which_errors_are_translated():
    for error in (RuntimeError("a"), type("PeerError", (RuntimeError,), {})("b")):
        with pytest.raises(HorovodInternalError, match=str(error)) as caught, translated():
            raise error
        assert caught.value.__cause__ is error
    for error in (ValueError("c"), TypeError("d"), NotImplementedError("e"), RecursionError("f"), KeyboardInterrupt("g")):
        with pytest.raises(type(error)) as caught, translated():
            raise error
        assert caught.value is error
    first = HorovodInternalError("h")
    with pytest.raises(HorovodInternalError) as caught, translated():
        raise first
    assert caught.value is first
    with translated():
        pass


@needs_peers
def test_a_rank_that_does_not_come(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.3")
    monkeypatch.delenv("MPIRING_TIMEOUT", raising=False)
    hvd.init()
    if RANK != LAST:
        with pytest.raises(hvd.HorovodInternalError, match=f"alone.*{LAST}"):
            hvd.allreduce(torch.ones(2), name="alone")
    COMM.Barrier()
    if RANK == LAST:                                     # the others' part is kept for it
        assert (hvd.allreduce(torch.ones(2), name="alone") == 1).all()
    COMM.Barrier()
    assert works()


class Ranks(torch.utils.data.Dataset):
    """Says what a worker process can learn, and what it cannot do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        error = attempt(lambda: hvd.allreduce(torch.ones(2)))
        found = torch.tensor([index, hvd.rank(), hvd.size(), isinstance(error, hvd.HorovodInternalError)])
        if index == 7:
            hvd.shutdown()
        return found


def test_workers_of_a_data_loader():
    """Forked from a rank, they may ask who it is, may not communicate, and end well."""
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # of threads and fork
        loader = torch.utils.data.DataLoader(Ranks(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        batches = [*loader, *loader]
    assert torch.cat(batches).tolist() == [[index, RANK, SIZE, 1] for index in range(8)] * 2 and time.perf_counter() - began < 30
    assert (hvd.synchronize(handle) == SIZE).all() and works()


def test_an_unnoticed_launcher():
    """More ranks were launched than MPI knows of: a warning says so."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI", "PMI", "PRTE", "PMIX"))}
    code = "import mpiring.torch as hvd; hvd.init(); print(hvd.size())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                           env={**environ, "MPI_LOCALNRANKS": "4", "OMPI_ALLOW_RUN_AS_ROOT": "1"}) if RANK == 0 else None
    if ended is not None:
        assert ended.stdout == "1\n" and "launched as one of 4 ranks" in ended.stderr, ended


def test_wrong_ranks_agree_on_the_error():
    """A comm without this rank is refused there; nothing was sent."""
    if SIZE > 1:
        found = all_attempt(lambda: hvd.init([0]) if RANK else None)
        assert found == [("NoneType", "None")] + [("ValueError", found[1][1])] * LAST or SIZE > 2
        assert all("does not have rank" in text for _, text in found[1:])
