"""Programs: every message has its receive, scratch stays small, segments have the length asked for."""

import doctest
from dataclasses import replace
from itertools import pairwise

import pytest

from mpiring.algorithms.cuts import counts
from mpiring.algorithms.registry import ALGORITHMS
from mpiring.algorithms.setting import Setting
from mpiring.runtime import arrays
from mpiring.runtime.arrays import boxes
from mpiring.runtime.program import GROUP, IN_FLIGHT, WINDOW, Memory, Slot, compile_program, window_of

MEMORIES = [Memory(), Memory(in_place=False), Memory(False, False, True), Memory(False, True, False), Memory(False, False, False),
            Memory(True, False, False), Memory(staged=True), Memory(False, False, False, staged=True)]


def programs(algorithm, size, count, segment, memory, root=0):
    """Return every rank's program, for ranks that are dealt to two nodes in turn."""
    setting = Setting(size, root if algorithm.collective.rooted else 0, pieces=3, nodes=tuple(rank % 2 for rank in range(size)))
    shares = counts(count, algorithm.chunks(setting))
    if algorithm.collective.name == "alltoall":
        shares = counts(count, size) * size
        memory = replace(memory, in_place=memory.in_place and count % size == 0)
    return [compile_program(algorithm, rank, setting, shares, segment, memory) for rank in range(size)]


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("key", ALGORITHMS, ids=str)
def test_streams_match_between_ranks(key, memory):
    for size in (1, 2, 5, 8):
        for count in (0, size + 1, 399):
            ranks = programs(ALGORITHMS[key], size, count, 16, memory)
            for a in range(size):
                for b in range(size):
                    sent = [(t.send.stop - t.send.start, t.send_last) for t in ranks[a].transfers if t.send_to == b]
                    due = [(t.recv.stop - t.recv.start, t.recv_last) for t in ranks[b].transfers if t.recv_from == a]
                    assert sent == due
                    assert [last for _, last in sent] == [False] * (len(sent) - 1) + [True] * bool(sent)


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("key", ALGORITHMS, ids=str)
def test_scratch_is_a_few_segments(key, memory):
    for size, root in ((3, 2), (8, 5)):
        for program in programs(ALGORITHMS[key], size, 1_600, 16, memory, root):
            assert all(length <= 16 for length in program.slots + program.host_slots)
            assert len(program.slots) <= 2 * (GROUP + WINDOW) + 2
            assert len(program.host_slots) <= (0 if not memory.staged else 2 * WINDOW + 4)


def test_short_segments_go_further_ahead():
    windows = {nbytes: window_of(nbytes) for nbytes in (64, 60 << 10, 128 << 10, 512 << 10, 1 << 20, 1 << 30)}
    assert list(windows.values()) == [WINDOW, WINDOW, 8, 4, 4, 4]
    assert windows[60 << 10] * (60 << 10) <= IN_FLIGHT


@pytest.mark.parametrize("key", ALGORITHMS, ids=str)
def test_slots_in_use_at_the_same_time_are_different(key):
    for program in programs(ALGORITHMS[key], 5, 2000, 16, Memory(False, False, False, staged=True)):
        slots = {id(piece.region): piece.region for transfer in program.transfers for piece in transfer.touches
                 if isinstance(piece.region, Slot)}.values()
        for host in (False, True):
            for index in {slot.index for slot in slots}:
                lives = sorted((slot.first, slot.last) for slot in slots if slot.index == index and slot.host is host)
                assert all(last < first for (_, last), (first, _) in pairwise(lives))


def test_begun_early_but_never_before_what_it_needs():
    for program in programs(ALGORITHMS["allreduce", "ring"], 4, 4000, 16, Memory()):
        for j, transfer in enumerate(program.transfers):
            assert transfer.pack_at <= transfer.start_at <= j and transfer.post_at <= j
        assert any(transfer.start_at < j for j, transfer in enumerate(program.transfers))
        assert any(transfer.post_at < j for j, transfer in enumerate(program.transfers))


def test_a_long_vector_compiles_quickly_enough_to_count_its_transfers():
    program = compile_program(ALGORITHMS["allreduce", "ring"], 0, Setting(8), counts(1 << 30, 8), 1 << 17, Memory(False))
    assert len(program.transfers) == 14 * 1024


def test_boxes_cover_a_range_in_order():
    import numpy as np

    assert doctest.testmod(arrays).failed == 0
    for shape in ((7,), (3, 4), (2, 3, 4), (1, 5, 1, 2), (2, 1, 3)):
        array = np.arange(np.prod(shape)).reshape(shape)
        for start in range(array.size + 1):
            for stop in range(start, array.size + 1):
                found = [(array[index], length) for index, length in boxes(shape, start, stop)]
                assert [value for view, _ in found for value in view.reshape(-1)] == list(range(start, stop))
                assert all(view.size == length for view, length in found) and len(found) <= 2 * len(shape)
