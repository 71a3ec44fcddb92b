"""The tests' own ground: cases that are drawn are the same on every rank."""

from hypothesis import strategies as st

from cases import COMM
from spmd import drawn


@drawn(st.lists(st.integers()), examples=10)
def test_every_rank_gets_rank_0s_case(case):
    assert COMM.allgather(case) == [case] * COMM.size
