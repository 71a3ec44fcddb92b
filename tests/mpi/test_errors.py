"""Wrong use on one rank: an error before anything is sent, naming rank and argument."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring

from cases import COMM, KINDS, RANK, SIZE

PLACE = f"allreduce on rank {RANK}: "


@pytest.fixture
def silent():
    """A comm on which nothing may be sent: no channel hangs on it after the test."""
    comm = COMM.Dup()
    yield comm
    from mpiring.runtime.channel import channel_key

    assert comm.Get_attr(channel_key()) is None
    comm.Free()


def read_only():
    array = np.ones(4)
    array.flags.writeable = False
    return array


BAD = [
    ("list", lambda: ([1, 2], None), TypeError, "sendbuf is of type list: not a NumPy or CuPy array"),
    ("scalar", lambda: (3.5, None), TypeError, "sendbuf is of type float"),
    ("none", lambda: (None, None), TypeError, "sendbuf is of type NoneType"),
    ("recv list", lambda: (np.ones(2), [1, 2]), TypeError, "recvbuf is of type list"),
    ("object", lambda: (np.array([None, 1]), None), TypeError, "sendbuf has dtype object, which is not numeric"),
    ("text", lambda: (np.array(["a"]), None), TypeError, "which is not numeric"),
    ("structured", lambda: (np.zeros(2, "f4,i4"), None), TypeError, "which is not numeric"),
    ("time", lambda: (np.zeros(2, "M8[s]"), None), TypeError, "which is not numeric"),
    ("masked", lambda: (np.ma.masked_array([1.0, 2.0], [0, 1]), None), TypeError, "sendbuf is a masked array: pass its .data"),
    ("read-only in place", lambda: (read_only(), None), ValueError, "sendbuf .* is read-only"),
    ("read-only result", lambda: (np.ones(4), read_only()), ValueError, "recvbuf is read-only"),
    ("bytes in place", lambda: (b"abc", None), ValueError, "read-only"),
    ("shape", lambda: (np.ones(4), np.ones((2, 2))), ValueError, r"recvbuf has shape \(2, 2\), but sendbuf has \(4,\)"),
    ("dtype", lambda: (np.ones(4), np.ones(4, np.float32)), TypeError, "recvbuf has dtype float32, but sendbuf has float64"),
    ("overlap", lambda: (lambda a: (a[:4], a[1:]))(np.ones(5)), ValueError, "sendbuf and recvbuf overlap"),
    ("reversed", lambda: (lambda a: (a, a[::-1]))(np.ones(5)), ValueError, "sendbuf and recvbuf overlap"),
    ("in place of nothing", lambda: (MPI.IN_PLACE, None), TypeError, "there is no other buffer"),
    ("in place twice", lambda: (MPI.IN_PLACE, MPI.IN_PLACE), TypeError, "there is no other buffer"),
    ("sliding window", lambda: (np.lib.stride_tricks.sliding_window_view(np.ones(5), 3, writeable=True), None), ValueError,
     "share memory"),
    ("shared elements", lambda: (np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)), None), ValueError, "share memory"),
]


@pytest.mark.parametrize("buffers, error, match", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "shared", "native", "auto"])
def test_buffers(buffers, error, match, algorithm, silent):
    with pytest.raises(error, match=PLACE + ".*" + match):
        mpiring.allreduce(*buffers(), algorithm=algorithm, comm=silent)


def test_algorithm(silent):
    with pytest.raises(TypeError, match=PLACE + "algorithm is of type list, not a name or an Algorithm"):
        mpiring.allreduce(np.ones(2), algorithm=["ring"], comm=silent)
    known = "known: ring, tree, .*, shared, native, auto"
    with pytest.raises(ValueError, match=PLACE + "unknown algorithm 'rign' for allreduce .did you mean 'ring'..; " + known):
        mpiring.allreduce(np.ones(2), algorithm="rign", comm=silent)


def test_ops(silent):
    for op, dtype, error, match in (
        (MPI.BAND, float, TypeError, "op BAND has no meaning for dtype float64"),
        (MPI.LXOR, float, TypeError, "op LXOR has no meaning for dtype float64"),
        (MPI.MAX, complex, TypeError, "op MAX has no meaning for dtype complex128"),
        (mpiring.AVERAGE, bool, TypeError, "op AVERAGE has no meaning for dtype bool"),
        (MPI.MAXLOC, float, TypeError, "op MAXLOC has no meaning"),
        (MPI.REPLACE, float, TypeError, "op REPLACE has no meaning"),
        ("SUM", float, TypeError, "op is of type str, not an MPI.Op or mpiring.AVERAGE"),
        (None, float, TypeError, "op is of type NoneType"),
        (MPI.OP_NULL, float, ValueError, "OP_NULL"),
    ):
        for algorithm in ("ring", "shared", "native", "auto"):
            with pytest.raises(error, match=PLACE + ".*" + match):
                mpiring.allreduce(np.ones(3, dtype), op=op, algorithm=algorithm, comm=silent)


def test_user_op_for_a_dtype_without_mpi_type(silent):
    op = MPI.Op.Create(lambda a, b, t: None, commute=True)
    for algorithm in ("ring", "shared", "native", "auto"):
        with pytest.raises(TypeError, match=PLACE + "MPI has no datatype for dtype >f8"):
            mpiring.allreduce(np.ones(3, ">f8"), op=op, comm=silent, algorithm=algorithm)
    op.Free()


def test_comm():
    with pytest.raises(TypeError, match=PLACE + "comm is of type int, not an MPI communicator"):
        mpiring.allreduce(np.ones(3), comm=5)
    with pytest.raises(ValueError, match=PLACE + "comm is MPI.COMM_NULL"):
        mpiring.allreduce(np.ones(3), comm=MPI.COMM_NULL)
    freed = COMM.Dup()
    mpiring.allreduce(np.ones(3), comm=freed)
    freed.Free()
    with pytest.raises(ValueError, match="COMM_NULL"):
        mpiring.allreduce(np.ones(3), comm=freed)


@pytest.mark.skipif(SIZE < 2, reason="needs two groups")
def test_inter_communicator():
    half = COMM.Split(RANK % 2)
    inter = half.Create_intercomm(0, COMM, 1 - RANK % 2, 7)
    with pytest.raises(ValueError, match=f"on rank {inter.rank}: comm is an inter-communicator"):
        mpiring.allreduce(np.ones(3), comm=inter)
    inter.Free()
    half.Free()


@pytest.mark.parametrize("algorithm", ["ring", "shared", "native", "auto"])
@pytest.mark.parametrize("kind", ["ordinary", "shared"])
def test_becoming_read_only_is_noticed_with_a_plan_there(kind, algorithm):
    array = KINDS[kind](np.ones(4))
    mpiring.allreduce(array, algorithm=algorithm)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        mpiring.allreduce(array, algorithm=algorithm)
    array.flags.writeable = True
    mpiring.allreduce(array, algorithm=algorithm)


def test_setting_that_is_no_number_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setenv("MPIRING_SEGMENT", "much" if RANK == 0 else "64")
    comm = COMM.Dup()
    with pytest.raises(ValueError, match="rank 0: MPIRING_SEGMENT is 'much'"):
        mpiring.allreduce(np.ones(3), comm=comm)
    monkeypatch.setenv("MPIRING_SEGMENT", "64")
    assert (mpiring.allreduce(np.ones(3), comm=comm) == SIZE).all()
    comm.Free()
