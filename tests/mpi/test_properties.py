"""Properties over drawn cases; the draw is rank 0's."""

import numpy as np
import pytest
from hypothesis import strategies as st

import mpiring
from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.cuts import offsets
from mpiring.runtime import binding, ops

from cases import COMM, DTYPES, KINDS, RANK, SIZE, bits, result, same_bits, values
from spmd import drawn

PAIRS = []
for _dtype in DTYPES:
    for _name, _op in ops.NAMES.items():
        try:
            ops.find(_op, _dtype)
        except TypeError:
            continue
        PAIRS.append((_dtype.str if _dtype.kind != "V" else "bfloat16", _name))

LAYOUT = st.tuples(st.integers(-3, 3).filter(bool), st.integers(0, 2), st.booleans())


def dtype_of(name):
    return np.dtype("bfloat16") if name == "bfloat16" else np.dtype(name)


def laid_out(flat, layout, kind="ordinary"):
    """Return a view with the elements of `flat`, with a step, an offset, in one dimension or two."""
    step, offset, square = layout
    room = KINDS[kind](np.zeros(offset + abs(step) * max(1, flat.size), flat.dtype))
    view = room[offset:offset + abs(step) * flat.size:abs(step)][::1 if step > 0 else -1]
    if square and flat.size % 2 == 0 and flat.size:
        view = view.reshape(2, -1) if view.flags.c_contiguous else np.lib.stride_tricks.as_strided(
            view, (2, flat.size // 2), (view.strides[0] * (flat.size // 2), view.strides[0]))
    view[...] = flat.reshape(view.shape)
    return view


@drawn(st.tuples(st.sampled_from(["ring", "tree", "shared", "auto"]), st.sampled_from(PAIRS), st.integers(0, 3 * SIZE + 300),
                 LAYOUT, LAYOUT, st.booleans(), st.sampled_from([64, 100, 1000, 1 << 19]), st.sampled_from(list(KINDS))),
       examples=80)
def test_allreduce_is_numpy_over_the_ranks(case):
    algorithm, (dtype, op), count, send_layout, recv_layout, inplace, segment, kind = case
    dtype, op = dtype_of(dtype), ops.NAMES[op]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setenv("MPIRING_SEGMENT", str(segment))
        patch.setattr(binding, "STAGE", min(binding.STAGE, segment * SIZE))
        comm = COMM.Dup()
        flat = values(RANK, count, dtype)
        send = laid_out(flat, send_layout, kind)
        recv = None if inplace else laid_out(np.zeros(count, dtype), (*recv_layout[:2], send.ndim == 2), kind)
        out = mpiring.allreduce(send, recv, op=op, comm=comm, algorithm=algorithm)
        assert out is (send if inplace else recv)
        assert bits(out.reshape(-1)) == bits(result(op, count, dtype))
        if not inplace:
            assert bits(send.reshape(-1)) == bits(flat)
        comm.Free()


@drawn(st.tuples(st.integers(0, 400), st.lists(st.integers(0, 50), min_size=SIZE, max_size=SIZE), LAYOUT, st.booleans(),
                 st.sampled_from([64, 100, 1 << 19]), st.sampled_from(["ring", "shared"])), examples=40)
def test_reduce_scatter_then_allgather_is_allreduce(case):
    count, shares, layout, even, segment, algorithm = case
    shares = balanced(count, SIZE) if even else shares
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPIRING_SEGMENT", str(segment))
        comm = COMM.Dup()
    edges = offsets(shares)
    mine = np.random.default_rng(RANK).normal(size=edges[-1])
    part = mpiring.reduce_scatter(laid_out(mine, layout), np.zeros(shares[RANK]), counts=shares, comm=comm, algorithm=algorithm)
    whole = mpiring.allgather(part, laid_out(np.zeros(edges[-1]), layout), counts=shares, comm=comm, algorithm=algorithm)
    assert same_bits(whole)
    if even:
        assert bits(whole.reshape(-1)) == bits(mpiring.allreduce(mine.copy(), comm=comm, algorithm=algorithm))
    else:
        exact = np.sum([np.random.default_rng(rank).normal(size=edges[-1]) for rank in range(SIZE)], axis=0)
        assert np.allclose(whole.reshape(-1), exact)
    comm.Free()
