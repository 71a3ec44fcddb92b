"""Ops that are not commutative: right with the algorithms that keep the order of ranks, refused by name with the others."""

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms import registry

from cases import COMM, RANK, SIZE, same_bits


def chain(left, right, _):
    """Chain maps x -> a x + b modulo 2^31, the left one last; an element holds a and b. Their order matters."""
    outer, inner = np.frombuffer(left, np.uint64), np.frombuffer(right, np.uint64)
    inner[:] = composed(outer, inner)


def composed(outer, inner):
    (a, b), (c, d) = ((maps >> np.uint64(32), maps & LOW) for maps in (outer, inner))
    return (a * c & LOW) << np.uint64(32) | (a * d + b & LOW)


ORDERED = ["shared", "native", "auto"]
"""Those beside the registry's, all of which keep the order of ranks."""

LOW = np.uint64(2**31 - 1)


@pytest.fixture
def op():
    op = MPI.Op.Create(chain, commute=False)
    yield op
    op.Free()


def maps(rank, count):
    random = np.random.default_rng(rank)
    return random.integers(1, 2**31, count, np.uint64) << np.uint64(32) | random.integers(0, 2**31, count, np.uint64)


def expected(count):
    result = maps(0, count)
    for rank in range(1, SIZE):
        result = composed(result, maps(rank, count))
    return result


def ordered(collective, root=0):
    return [name for name in registry.names(collective) if mpiring.verify(name, SIZE, collective=collective, root=root).ordered]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("algorithm", [*registry.names("allreduce"), *ORDERED])
def test_allreduce(op, algorithm, inplace):
    for count in (1, 5, 300):
        mine = maps(RANK, count)
        out = mine if inplace else np.zeros_like(mine)
        if algorithm in [*ordered("allreduce"), *ORDERED]:
            assert mpiring.allreduce(mine, out, op=op, algorithm=algorithm) is out
            assert (out == expected(count)).all()
            assert inplace or (mine == maps(RANK, count)).all()
        else:
            with pytest.raises(ValueError, match=f"op is not commutative, and algorithm '{algorithm}' reduces in another order "
                               f"than that of the {SIZE} ranks; use one that keeps it: tree, recursive_doubling, .*shared, native"):
                mpiring.allreduce(mine, out, op=op, algorithm=algorithm)


@pytest.mark.parametrize("root", range(SIZE))
def test_reduce(op, root):
    for algorithm in [*ordered("reduce", root), *ORDERED]:
        out = mpiring.reduce(maps(RANK, 70), op=op, root=root, algorithm=algorithm)
        assert RANK != root or (out == expected(70)).all()
        wide = np.zeros((70, 2), np.uint64)[:, 1]
        wide[...] = maps(RANK, 70)
        out = mpiring.reduce(wide, op=op, root=root, algorithm=algorithm)
        assert RANK != root or (out == expected(70)).all()
    assert "tree" in ordered("reduce", root)


@pytest.mark.parametrize("algorithm", [*registry.names("allreduce"), "shared"])
def test_signed_zeros_and_nans_have_the_same_bits_everywhere(algorithm):
    """NumPy's maximum of zeros, and its sum of NaNs, take the sign or the payload of one operand: the same one on all ranks."""
    zeros = np.where((np.arange(64) + RANK) % 3 == 0, -0.0, 0.0)
    assert same_bits(mpiring.allreduce(zeros, op=MPI.MAX, algorithm=algorithm))
    nans = np.full(64, 0x7FF8000000000000 + 1 + RANK, np.uint64).view(np.float64)
    for op in (MPI.SUM, MPI.MAX, MPI.PROD):
        assert same_bits(mpiring.allreduce(nans.copy(), op=op, algorithm=algorithm))
    COMM.Barrier()
