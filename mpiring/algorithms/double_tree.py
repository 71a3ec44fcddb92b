"""Two binary trees with half the vector each; a rank that has children in one is a leaf of the other.

So every rank sends and receives in every round, which one tree alone never achieves: its leaves only send, then only receive.
Source: P. Sanders, J. Speck and J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009). The second tree is the first one mirrored (even n) or moved by one (odd n), as in NCCL, src/graph/trees.cc.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.algorithms import pipelined_tree
from mpiring.algorithms.step import Step


def allreduce(rank: int, size: int, pieces: int) -> Iterator[Step]:
    """Reduce the vector onto all: 4(h + k) steps of 1/2k of the vector, h = floor(log2(n-1)), k pieces of each half.

    Each rank sends the vector about twice, whatever n is, as with the ring, but in a number of steps that grows with log2 n only.
    """
    return pipelined_tree.allreduce(rank, size, pieces, trees=2)


def best_pieces(size: int, nbytes: int, latency: float) -> int:
    """As for one tree, for half the vector."""
    return pipelined_tree.best_pieces(size, nbytes, latency, trees=2)
