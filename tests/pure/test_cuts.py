"""Cuts: balanced, whole, in order."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from mpiring.algorithms import cuts as module
from mpiring.algorithms.cuts import counts, cuts, offsets


@given(st.integers(0, 10**12), st.integers(1, 500))
def test_shares_differ_by_one_at_most_and_make_the_whole(count, parts):
    shares = counts(count, parts)
    assert len(shares) == parts and sum(shares) == count
    assert max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices_follow_one_another(count, parts):
    slices = cuts(count, parts)
    assert [i for piece in slices for i in range(count)[piece]] == list(range(count))
    assert [piece.start for piece in slices] + [count] == offsets(counts(count, parts))


def test_examples_in_docstrings():
    assert doctest.testmod(module).failed == 0
