"""The jobs of ranks that share memory: every element is reduced once, from all who bring it, and written to all who want it."""

from collections import Counter

import pytest

from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.cuts import offsets
from mpiring.algorithms.registry import COLLECTIVES
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.shared import Job, Work, jobs, part

SIZES = [1, 2, 3, 7]
COUNTS = [0, 1, 150]


def works(size, count):
    """Yield every collective as the ranks of one node see it."""
    for root in {0, size - 1}:
        for collective in ("allreduce", "reduce", "broadcast"):
            yield Work(collective, size, [count], root if COLLECTIVES[collective].rooted else None)
    for shares in (balanced(count, size), [count] + [0] * (size - 1)):
        yield Work("reduce_scatter", size, shares)
        yield Work("allgather", size, shares)
    yield Work("alltoall", size, [(sender * 7 + receiver) % 5 for sender in range(size) for receiver in range(size)])


def places(entries, length):
    """Return every element of some places, as often as it is in them."""
    return Counter((peer, start + index) for peer, start in entries for index in range(length))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
def test_every_element_is_made_once_of_all_and_goes_to_all(size, count):
    for work in works(size, count):
        found = [job for rank in range(size) for job in jobs(work, rank)]
        made = sum((places(job.targets, job.length) for job in found), Counter())
        assert set(made.values()) <= {1}, "an element is written once"
        if work.collective == "alltoall":
            wanted = {(rank, place) for rank in range(size) for place in range(sum(work.shares[rank::size]))}
        else:
            collective, setting = COLLECTIVES[work.collective], Setting(size, work.root or 0)
            edges = offsets(list(work.shares))
            wanted = {(rank, place) for rank in range(size) for chunk in collective.wanted(rank, setting, len(edges) - 1)
                      for place in range(edges[chunk], edges[chunk + 1])}
            if work.collective == "broadcast":
                wanted = {(rank, place) for rank, place in wanted if rank != work.root}     # it has the vector
            for job in found:
                givers = {rank for rank in range(size) if set(collective.given(rank, setting, len(edges) - 1))
                          & {chunk for chunk in range(len(edges) - 1) if edges[chunk] <= job.sources[0][1] < edges[chunk + 1]}}
                assert [peer for peer, _ in job.sources] == sorted(givers), "all who have it, in the order of ranks"
                assert len({start for _, start in (*job.sources, *job.targets)}) == 1
        assert set(made) == wanted


def test_alltoall_blocks_are_matched():
    size = 3
    work = Work("alltoall", size, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert jobs(work, 1) == [Job(((1, 4),), ((1, 2),), 5), Job(((2, 7),), ((1, 7),), 8), Job(((0, 1),), ((1, 0),), 2)]


@pytest.mark.parametrize("size", SIZES)
def test_what_a_job_writes_no_other_reads(size):
    """Jobs have no order: in place, a result must not lie where another still reads (alltoall is staged for that)."""
    for work in works(size, 200):
        if work.collective == "alltoall":
            continue
        found = [job for rank in range(size) for job in jobs(work, rank)]
        for job in found:
            if work.collective == "allgather" and job.sources == job.targets:
                continue                                 # a rank's own chunk: in place there is nothing to write
            others = set().union(*(places(other.sources, other.length) for other in found if other is not job))
            assert not set(places(job.targets, job.length)) & others


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_work_on_the_same_parts_on_every_node(lanes):
    for size in (lanes, lanes + 2):
        work = Work("allreduce", size, [1000], None, lanes)
        found = [jobs(work, rank) for rank in range(size)]
        assert found[lanes:] == [[]] * (size - lanes)
        assert [(job.sources[0][1], job.length) for [job] in found[:lanes]] == [part(1000, lanes, lane) for lane in range(lanes)]
        assert all(len(job.sources) == len(job.targets) == size for [job] in found[:lanes])


def test_halves_of_jobs_where_the_root_is_on_another_node():
    assert jobs(Work("reduce", 2, [100], None, 1), 0) == [Job(((0, 0), (1, 0)), (), 100)]
    assert jobs(Work("broadcast", 2, [100], None, 1), 0) == [Job((), ((0, 0), (1, 0)), 100)]
    assert jobs(Work("broadcast", 2, [100], 1, 1), 0) == [Job(((1, 0),), ((0, 0),), 100)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 640, 10_007])
def test_parts_follow_each_other_in_whole_grains(count, parts):
    found = [part(count, parts, index) for index in range(parts)]
    assert sum(length for _, length in found) == count
    assert all(start + length == following for (start, length), (following, _) in zip(found, found[1:]))
    assert all(start % 64 == 0 or start == count for start, _ in found)
    assert max(length for _, length in found) - min(length for _, length in found) <= 128
