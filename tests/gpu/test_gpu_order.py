"""Order between the GPU's stream and MPI: nothing is sent before it is there, nothing is overwritten before it has been read."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.runtime.arrays import Device
from mpiring.runtime.channel import channel_key

import standin

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
needs_peers = pytest.mark.skipif(SIZE == 1, reason="one rank sends no messages")
CALLS = {
    "ring": lambda array, comm: mpiring.ring_allreduce(array, comm=comm),
    "ring average": lambda array, comm: mpiring.ring_allreduce(array, op=mpiring.AVERAGE, comm=comm),
    "tree": lambda array, comm: mpiring.tree_allreduce(array, comm=comm),
    "ring, not in place": lambda array, comm: mpiring.ring_allreduce(array, standin.empty(array.shape, array.dtype), comm=comm),
    "ring, a column": lambda array, comm: mpiring.ring_allreduce(array.reshape(-1, 2)[:, :1], comm=comm),
    "tree, a column": lambda array, comm: mpiring.tree_allreduce(array.reshape(-1, 2)[:, :1], comm=comm),
    "reduce_scatter": lambda array, comm: mpiring.reduce_scatter(array, comm=comm, algorithm="ring"),
    "allgather": lambda array, comm: mpiring.allgather(array, comm=comm, algorithm="ring"),
}


def mine(count=1000):
    """Make an array whose values are still on their way to the device."""
    return standin.asarray(np.arange(count, dtype=np.float64) + RANK)


def total(count=1000):
    return np.arange(count, dtype=np.float64) * SIZE + SIZE * (SIZE - 1) / 2


def overlap(a, b):
    return a[0] < b[1] and b[0] < a[1]


class Watch:
    """Stands between a plan and its comm, and between it and the stand-in's queue; notes every clash of messages and work.

    Memory that MPI reads must have no write under way or queued, memory that MPI writes no read either, from the start of the
    message until it has been waited for.
    """

    def __init__(self, comm, patch):
        self.comm, self.clashes, self.open, self.messages = comm, [], {}, 0
        queue = standin._queue

        def queued(*args):
            queue(*args)
            for work in standin.pending()[-1:]:
                for memory, written in self.open.values():
                    self._check(work, memory, written, "was queued during")

        patch.setattr(standin, "_queue", queued)

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def _check(self, work, memory, written, when):
        if overlap(work.writes, memory) or (written and any(overlap(read, memory) for read in work.reads)):
            self.clashes.append(f"{work.name} {when} {'a receive' if written else 'a send'}")

    def _start(self, buffer, written):
        self.messages += 1
        address = buffer[0].data.ptr if isinstance(buffer[0], standin.ndarray) else MPI.Get_address(buffer[0])
        memory = address, address + buffer[1]
        for work in standin.pending():
            self._check(work, memory, written, "was under way at the start of")
        return memory, written

    def _request(self, request, memory):
        self.open[id(request)] = memory
        return _Request(request, self.open)

    def Irecv(self, buffer, *rest):
        return self._request(self.comm.Irecv(buffer, *rest), self._start(buffer, written=True))

    def Isend(self, buffer, *rest):
        return self._request(self.comm.Isend(buffer, *rest), self._start(buffer, written=False))

    def Sendrecv(self, sendbuf, dest, tag, recvbuf, *rest):
        self._start(sendbuf, written=False)
        self._start(recvbuf, written=True)
        self.comm.Sendrecv(sendbuf, dest, tag, recvbuf, *rest)


class _Request:
    def __init__(self, request, table):
        self.request, self.table = request, table

    def __getattr__(self, name):
        return getattr(self.request, name)

    def Wait(self, status=None):
        self.request.Wait(status)
        self.table.pop(id(self.request), None)


@pytest.fixture
def watch(stand, monkeypatch):
    """Watch the messages of the comm with the smallest segments."""
    channel = stand.comms[64].Get_attr(channel_key())
    watcher = Watch(channel.comm, monkeypatch)
    monkeypatch.setattr(channel, "comm", watcher)
    return watcher


@pytest.mark.parametrize("call", CALLS)
def test_messages_and_work_do_not_clash(stand, watch, call):
    CALLS[call](mine(), stand.comms[64])
    assert not watch.clashes
    assert not watch.open
    assert watch.messages > 10 or SIZE == 1
    assert not standin.pending(), "the result is not complete when the call returns"


@needs_peers
@pytest.mark.parametrize("call", CALLS)
def test_without_waiting_they_clash(stand, watch, call, monkeypatch):
    monkeypatch.setattr(Device, "settle", lambda self: None)
    CALLS[call](mine(), stand.comms[64])
    assert watch.clashes


@needs_peers
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_without_waiting_the_result_is_wrong(stand, algorithm, monkeypatch):
    array = mine()
    monkeypatch.setattr(Device, "settle", lambda self: None)
    mpiring.allreduce(array, comm=stand.comms[64], algorithm=algorithm)
    standin.get_current_stream().synchronize()
    assert (standin.peek(array) != total()).any()


@needs_peers
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_on_a_stream_that_nobody_waits_for_the_result_is_wrong(stand, algorithm, monkeypatch):
    if stand.reachable:
        pytest.skip("MPI reads device memory: there are no copies to and from host memory")
    other, copy = standin.Stream(), Device.copy

    def astray(self, target, source):
        with other:
            copy(self, target, source)

    array, comm = mine(), stand.comms[64].Dup()     # a comm without plans, for a plan keeps the way it copies
    monkeypatch.setattr(Device, "copy", astray)
    mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    other.synchronize()
    comm.Free()
    assert (standin.peek(array) != total()).any()


def test_the_final_wait_is_needed(stand, monkeypatch):
    array = mine()
    monkeypatch.setattr(Device, "settle", lambda self: None)
    mpiring.ring_allreduce(array, comm=stand.comms[4096])
    assert (standin.peek(array).view(np.uint8) == standin.POISON).any()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "native", "auto"])
def test_work_goes_to_the_current_stream(stand, algorithm):
    stream = standin.Stream()
    with stream:
        array = mine()
        mpiring.allreduce(array, comm=stand.comms[64], algorithm=algorithm)
        assert (standin.peek(array) == total()).all()
    assert not standin.pending()


@pytest.mark.parametrize("algorithm", ["ring", "native", "auto"])
def test_an_allreduce_beside_the_caller_goes_to_its_stream(stand, algorithm):
    stream = standin.Stream()
    with stream:
        array, out = mine(), standin.empty(1000)
        request = mpiring.iallreduce(array, out, comm=stand.comms[64], algorithm=algorithm)
    assert request.wait() is out
    assert (standin.peek(out) == total()).all() and not standin.pending()
    plan = mpiring.allreduce_init(array, out, comm=stand.comms[64], algorithm=algorithm)
    for _ in range(2):
        with stream:
            standin.copyto(array, out)
            plan.start()
        assert plan.wait() is out
        assert not standin.pending()
    assert (standin.peek(out) == total() * SIZE ** 2).all()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "native"])
def test_the_log_ends_with_a_wait(stand, algorithm):
    mpiring.allreduce(mine(), comm=stand.comms[64], algorithm=algorithm)
    assert standin.LOG[-1] == ("synchronize",)


@pytest.mark.parametrize("op", [MPI.SUM, mpiring.AVERAGE], ids=["SUM", "AVERAGE"])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_running_a_plan_allocates_nothing(stand, algorithm, op):
    array, result = mine(), standin.empty(1000)
    options = {"comm": stand.comms[64], "algorithm": algorithm, "op": op}
    for buffers in ((array, result), (array,)):
        mpiring.allreduce(*buffers, **options)
        standin.LOG.clear()
        mpiring.allreduce(*buffers, **options)
        assert [entry for entry in standin.LOG if entry[0] == "allocate"] == []


@needs_peers
def test_staged_copies_and_sums(stand):
    mpiring.ring_allreduce(mine(SIZE), comm=stand.comms[64])
    ufuncs = [entry for entry in standin.LOG if entry[0] == "ufunc"]
    copies = [entry[1] for entry in standin.LOG if entry[0] == "copy"][1:]     # but for the one that made the array
    assert ufuncs == [("ufunc", "add")] * (SIZE - 1)
    messages = 2 * (SIZE - 1)
    assert copies.count("device to host") == copies.count("host to device") == (0 if stand.reachable else messages)


@needs_peers
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_after_a_mismatch_the_comm_is_as_good_as_before(stand, watch, algorithm):
    comm = stand.comms[64]
    with pytest.raises(mpiring.MismatchError):
        mpiring.allreduce(mine(1000 if RANK else 900), comm=comm, algorithm=algorithm)
    watch.open.clear()                        # given up, and waited for in other ways
    array = mine()
    mpiring.allreduce(array, comm=comm, algorithm=algorithm)
    assert (standin.peek(array) == total()).all()
    assert not watch.clashes
