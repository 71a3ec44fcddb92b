"""Arrays of every kind: layouts, shapes, and whatever else NumPy can wrap."""

import array
import ctypes

import numpy as np
import pytest
from mpi4py import MPI

import mpiring

from cases import COMM, KINDS, LAYOUTS, RANK, SIZE, result, values

DTYPE = np.dtype(np.float64)
BASE = values(RANK, 60 * 11, DTYPE).reshape(60, 11)
SUM = result(MPI.SUM, 60 * 11, DTYPE).reshape(60, 11)
ALGORITHMS = ["ring", "tree", "shared", "native", "auto"]
PARTS = {
    "all": lambda whole: whole.reshape(-1)[:660].reshape(60, 11),
    "rows": lambda whole: whole.reshape(-1)[7:667].reshape(60, 11),
    "rows of another place": lambda whole: whole.reshape(-1)[RANK:660 + RANK].reshape(60, 11),
    "columns": lambda whole: whole[:, 3:14],
    "backwards": lambda whole: whole[::-1, 10::-1],
    "rows on some ranks": lambda whole: whole[:, :11] if RANK % 2 else whole.reshape(-1)[:660].reshape(60, 11),
}
"""Views of 60 rows with 11 columns, of a shared array of 60 rows and 30 columns."""


@pytest.fixture(params=["", "64", "200"])
def comm(request, monkeypatch):
    """A comm whose segments are of the usual length, or so short that arrays fall into many."""
    monkeypatch.setenv("MPIRING_SEGMENT", request.param)
    comm = COMM.Dup()
    yield comm
    comm.Free()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_place(layout, algorithm, comm):
    view = LAYOUTS[layout](BASE)
    around = view if view.base is None else view.base
    untouched = around.nbytes - view.nbytes
    assert mpiring.allreduce(view, algorithm=algorithm, comm=comm) is view
    assert (view == SUM).all()
    view[...] = 0
    assert untouched == 0 or not np.any(around), "something outside the view was written"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layouts_may_differ_between_ranks_and_between_buffers(algorithm, comm):
    kinds = list(LAYOUTS)
    send, recv = LAYOUTS[kinds[RANK % len(kinds)]](BASE), LAYOUTS[kinds[(RANK + 2) % len(kinds)]](np.zeros_like(BASE))
    mpiring.allreduce(send, recv, algorithm=algorithm, comm=comm)
    assert (recv == SUM).all() and (send == BASE).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_shapes(algorithm):
    for shape in ((), (0,), (1,), (3, 0, 2), (1, 1, 1), (2, 3, 4, 5)):
        for kind in ("ordinary", "shared"):
            mine = KINDS[kind](np.full(shape, RANK + 1.0))
            out = mpiring.allreduce(mine, algorithm=algorithm)
            assert out is mine and out.shape == shape and (out == SIZE * (SIZE + 1) / 2).all()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_parts_of_shared_arrays(algorithm, part):
    arrays = [mpiring.empty((60, 30)) for _ in range(2)]
    send, recv = map(PARTS[part], arrays)
    send[...] = BASE
    assert mpiring.allreduce(send, recv, algorithm=algorithm) is recv
    assert (recv == SUM).all() and (send == BASE).all()
    assert mpiring.allreduce(send, algorithm=algorithm) is send and (send == SUM).all()
    send[...], recv[...] = 0, 0
    assert not any(array.any() for array in arrays), "something outside the view was written"


@pytest.mark.parametrize("algorithm", ["ring", "shared", "auto"])
def test_other_buffers(algorithm):
    total = SIZE * (SIZE + 1) // 2
    for buffer in (bytearray([RANK + 1] * 20), array.array("i", [RANK + 1] * 20), (ctypes.c_double * 20)(*[RANK + 1] * 20),
                   memoryview(bytearray([RANK + 1] * 20))):
        out = mpiring.allreduce(buffer, algorithm=algorithm)
        assert isinstance(out, np.ndarray) and (out == total).all()
        assert (np.asarray(memoryview(buffer)) == total).all()
    out = mpiring.allreduce(bytes([RANK + 1] * 20), np.zeros(20, np.uint8), algorithm=algorithm)
    assert (out == total).all()
    assert mpiring.allreduce(np.float64(RANK + 1), np.zeros(()), algorithm=algorithm) == total


def test_subclasses_keep_their_type():
    class Mine(np.ndarray):
        pass

    buffer = np.full(7, 1.0).view(Mine)
    assert mpiring.allreduce(buffer) is buffer and (buffer == SIZE).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_read_only_input_is_fine(algorithm):
    mine = np.full(10, float(RANK))
    mine.flags.writeable = False
    assert (mpiring.allreduce(mine, np.zeros(10), algorithm=algorithm) == SIZE * (SIZE - 1) / 2).all()
    one = np.broadcast_to(np.float32(1), (4, 5))
    assert (mpiring.allreduce(one, np.zeros((4, 5), np.float32), algorithm=algorithm) == SIZE).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_interleaved_views_do_not_overlap(algorithm):
    both = np.zeros(20)
    both[::2] = RANK + 1
    assert (mpiring.allreduce(both[::2], both[1::2], algorithm=algorithm) == SIZE * (SIZE + 1) / 2).all()
    assert (both[::2] == RANK + 1).all()


def test_in_place_in_all_its_spellings():
    for call in (lambda a: mpiring.allreduce(a), lambda a: mpiring.allreduce(a, MPI.IN_PLACE),
                 lambda a: mpiring.allreduce(MPI.IN_PLACE, a), lambda a: mpiring.allreduce(a, a),
                 lambda a: mpiring.allreduce(a, a[:])):
        mine = np.ones(10)
        call(mine)
        assert (mine == SIZE).all()


@pytest.mark.deadline(300)
@pytest.mark.skipif(SIZE != 2, reason="2 GiB on each rank: 2 ranks are enough")
@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared", "native"])
def test_more_than_two_gib(algorithm):
    count = 2**31 + 12345
    mine = np.zeros(count, np.uint8)
    mine[::2**20] = 1 + RANK
    mine[-1] = 7
    mpiring.allreduce(mine, algorithm=algorithm)
    assert mine[-1] == 14 and (mine[::2**20] == 3).all() and int(mine.sum(dtype=np.int64)) == 14 + 3 * len(range(0, count, 2**20))
