"""The engine's parts that need no other ranks: what is fused, how it is laid out and scaled, settings, and texts."""

import doctest
from itertools import pairwise
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiring.engine import bursts
from mpiring.engine.bursts import LONG, Burst, pack, padded, unpack
from mpiring.engine.negotiation import Slot
from mpiring.engine.operation import Description, Operation, shown
from mpiring.engine.scaling import scale
from mpiring.engine.schedule import ALONE, BURST, DIRECT, VECTOR, batches, parts_of
from mpiring.engine.settings import CYCLE_TIME, FUSION_THRESHOLD, VARIABLES, Settings, agree, read
from mpiring.runtime import vectored
from mpiring.runtime.vectored import PIECES, blocks

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in "?bhilqBHILQefdgFDG"] + [BFLOAT16, np.dtype(">f4"), np.dtype(">i8")]


def allreduce(*shapes, dtype="float32", op="SUM", **more):
    return Description("allreduce", (dtype,) * len(shapes), shapes, op, **more)


def slots(*descriptions):
    """Return slots of these descriptions; their keys are their places."""
    return [Slot(place, description, 2) for place, description in enumerate(descriptions)]


def ways(descriptions, threshold, vectors_from=None):
    """Return for each exchange its way and the (operation, array) that go there."""
    return [(batch.way, [(slot.key, index) for slot, index in batch.members])
            for batch in batches(slots(*descriptions), threshold, vectors_from)]


# ----------------------------------------------------------------- what goes together

def test_arrays_go_together_up_to_the_threshold():
    found = ways([allreduce((10,))] * 7, 120)
    assert found == [(BURST, [(0, 0), (1, 0), (2, 0)]), (BURST, [(3, 0), (4, 0), (5, 0)]), (BURST, [(6, 0)])]
    assert ways([allreduce((10,)), allreduce((21,)), allreduce((10,)), allreduce((10,)), allreduce((31,))], 120) == [
        (BURST, [(0, 0)]), (BURST, [(1, 0)]), (BURST, [(2, 0), (3, 0)]), (ALONE, [(4, 0)])]


def test_an_array_of_the_thresholds_size_is_fused_and_a_larger_one_is_not():
    assert ways([allreduce((30,)), allreduce((31,))], 120) == [(BURST, [(0, 0)]), (ALONE, [(1, 0)])]


def test_large_arrays_go_alone_whatever_the_threshold():
    count = DIRECT // 4
    assert ways([allreduce((count,)), allreduce((count - 1,))], 1 << 30) == [(ALONE, [(0, 0)]), (BURST, [(1, 0)])]


def test_a_threshold_of_nothing_fuses_no_elements():
    found = ways([allreduce((1,)), allreduce(()), Description("broadcast", ("int8",), ((1,),), root=0)], 0)
    assert [way for way, _ in found] == [ALONE] * 3


def test_groups_are_split_into_arrays():
    assert ways([allreduce((10,), (40,), (10,)), allreduce((5,))], 120) == [
        (BURST, [(0, 0), (0, 2), (1, 0)]), (ALONE, [(0, 1)])]


@pytest.mark.parametrize("other", [
    allreduce((4,), dtype="int32"), allreduce((4,), op="MAX"), allreduce((4,), device=True),
    Description("broadcast", ("float32",), ((4,),), root=0), allreduce((4,), dtype=">f4")], ids=str)
def test_what_is_not_alike_does_not_go_together(other):
    assert ways([allreduce((4,)), other, allreduce((4,)), other], 1000) == [(BURST, [(0, 0), (2, 0)]), (BURST, [(1, 0), (3, 0)])]


def test_factors_are_each_arrays_own():
    assert ways([allreduce((4,)), allreduce((4,), prescale=0.5), allreduce((4,), postscale=3.0)], 1000) == [
        (BURST, [(0, 0), (1, 0), (2, 0)])]


def test_broadcasts_go_together_by_their_root_whatever_the_dtype():
    found = [Description("broadcast", (dtype,), ((4,),), root=root) for dtype, root in
             (("int8", 0), ("float64", 0), ("int8", 1), ("bool", 0))]
    assert ways(found, 1000) == [(BURST, [(0, 0), (1, 0), (3, 0)]), (BURST, [(2, 0)])]


@pytest.mark.parametrize("description", [
    allreduce((4,), op="an op made with MPI.Op.Create"), Description("barrier"),
    Description("reduce_scatter", ("float32",), ((4,),), "SUM"), Description("allgather", ("float32",), ((None, 3),)),
    Description("alltoall", ("float32",), ((None,),))], ids=str)
def test_what_is_never_fused(description):
    assert ways([description, description], 1000, 0) == [(ALONE, [(0, 0)]), (ALONE, [(1, 0)])]


def test_arrays_that_are_alike_and_long_together_are_one_vector():
    many = [allreduce((10,)), allreduce((40,), (10,)), allreduce((10,), op="MAX")]
    assert ways(many, 120, 241) == ways(many, 120)
    found = batches(slots(*many), 120, 240)
    assert ways(many, 120, 240) == [(VECTOR, [(0, 0), (1, 0), (1, 1)]), (BURST, [(2, 0)])]
    assert [(batch.way, [(slot.key, index) for slot, index in batch.members]) for batch in found[0].instead] == [
        (BURST, [(0, 0), (1, 1)]), (ALONE, [(1, 0)])]


@pytest.mark.parametrize("description", [
    allreduce((40,), prescale=0.5), allreduce((40,), postscale=0.5), allreduce((40,), device=True),
    allreduce((40,), dtype="float16"), allreduce((40,), dtype="bfloat16"),
    allreduce((0,)), allreduce((40,), op="an op made with MPI.Op.Create")], ids=str)
def test_what_is_never_part_of_a_vector(description):
    assert VECTOR not in [way for way, _ in ways([description] * 3, 120, 0)]


DESCRIPTIONS = st.one_of(
    st.builds(lambda lengths, dtype, op, factor, device: allreduce(
        *((length,) for length in lengths), dtype=dtype, op=op, prescale=factor, device=device),
        st.lists(st.integers(0, 60) | st.just(DIRECT), min_size=1, max_size=4), st.sampled_from(["float32", "int64", "float16"]),
        st.sampled_from(["SUM", "AVERAGE"]), st.sampled_from([1.0, 2.0]), st.booleans()),
    st.builds(lambda length, root: Description("broadcast", ("int8",), ((length,),), root=root),
              st.integers(0, 60), st.integers(0, 1)),
    st.sampled_from([Description("barrier"), Description("allgather", ("int8",), ((None,),))]))


@given(st.lists(DESCRIPTIONS, max_size=12), st.integers(0, 300), st.none() | st.integers(0, 500))
def test_every_array_is_exchanged_once_and_with_its_like(descriptions, threshold, vectors_from):
    ready = slots(*descriptions)
    members = [(key, index) for key, what in enumerate(descriptions) for index in range(max(1, len(what.shapes)))]
    found = batches(ready, threshold, vectors_from)
    assert sorted((slot.key, index) for batch in found for slot, index in batch.members) == members
    for batch in found:
        alternatives = [(slot.key, index) for other in batch.instead for slot, index in other.members]
        assert sorted(alternatives) == (sorted((slot.key, index) for slot, index in batch.members) if batch.way == VECTOR else [])
        for exchange in (batch, *batch.instead):
            parts = [parts_of(slot.description, threshold)[index] for slot, index in exchange.members]
            nbytes = sum(part.nbytes for part in parts)
            if exchange.way == BURST:
                assert len({part.group for part in parts}) == 1 and parts[0].group is not None and nbytes <= threshold
            elif exchange.way == VECTOR:
                assert len({part.vector for part in parts}) == 1 and parts[0].vector is not None and nbytes >= vectors_from
            else:
                assert len(parts) == 1
            if exchange.way != VECTOR:
                assert exchange.members == sorted(exchange.members, key=lambda member: (member[0].key, member[1]))


def test_parts_are_worked_out_once_for_each_slot():
    slot, = slots(allreduce((4,)))
    batches([slot], 1000)
    assert slot.parts == parts_of(slot.description, 1000)
    slot.parts = parts_of(slot.description, 0)
    assert batches([slot], 1000)[0].way == ALONE
    slot.say(1, slot.description, 1)
    assert batches([slot], 1000)[0].way == BURST


# ----------------------------------------------------------------- bursts

def room(nbytes):
    return np.full(nbytes, 0xA5, np.uint8)


def operation(arrays, outs, **factors):
    dtypes, shapes = tuple(array.dtype.name for array in arrays), tuple(array.shape for array in arrays)
    return Operation(Description("allreduce", dtypes, shapes, "SUM", **factors), None, arrays, outs, None, 0)


def burst_of(arrays, grain=1, dtype=None, scaled=False):
    return Burst(room, [(array.dtype, array.shape) for array in arrays], grain, dtype or arrays[0].dtype, True, scaled)


@given(st.integers(0, 1 << 40))
def test_the_lengths_of_bursts_are_few(count):
    found = padded(count)
    assert count <= found <= count + count // 8 and padded(found) == found


def test_a_power_of_two_has_eight_lengths():
    assert len({padded(count) for count in range(1025, 2049)}) == 8 == len({padded(count) for count in range(65, 129)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_lie_side_by_side(dtype):
    arrays = [np.ones(shape, dtype) for shape in ((3,), (), (0, 2), (2, 5))]
    burst = burst_of(arrays)
    assert burst.nbytes == 14 * dtype.itemsize and burst.whole.dtype == dtype and burst.whole.size == padded(14)
    assert [(view.shape, view.dtype) for view in burst.views] == [(array.shape, dtype) for array in arrays]
    places = [view.ctypes.data - burst.whole.ctypes.data for view in burst.views if view.size]
    assert places == [0, 3 * dtype.itemsize, 4 * dtype.itemsize]


def test_a_burst_of_nothing():
    burst = burst_of([np.ones(0), np.ones((3, 0))])
    assert burst.whole.size == burst.nbytes == 0 and [view.shape for view in burst.views] == [(0,), (3, 0)]


def test_bytes_of_several_dtypes_begin_where_these_want_it():
    arrays = [np.arange(3, dtype=np.int8), np.array(2.5), np.array([1j, 2], np.complex64), np.arange(5, dtype=np.longdouble)]
    burst = burst_of(arrays, 16, np.dtype(np.uint8))
    pack(burst, [operation([array], [None]) for array in arrays], [0] * 4)
    for view, array in zip(burst.views, arrays):
        assert (view == array).all() and view.flags.aligned and (view.ctypes.data - burst.whole.ctypes.data) % 16 == 0
    assert burst.whole.size >= burst.nbytes >= sum(array.nbytes for array in arrays)


LAYOUTS = {
    "contiguous": lambda array: array.copy(),
    "strided": lambda array: np.repeat(array, 2, 0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "unaligned": lambda array: np.frombuffer(bytearray(b" " + array.tobytes()), np.uint8)[1:].view(array.dtype),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [7, LONG, 5 * LONG + 3])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_what_is_packed_comes_out_again(dtype, count, layout):
    arrays = [LAYOUTS[layout]((np.arange(length) % 100).astype(dtype)) for length in (count, 5)]
    before = [array.copy() for array in arrays]
    outs = [LAYOUTS[layout](np.zeros_like(array)) for array in arrays]
    whole, burst = operation(arrays, outs), burst_of(arrays)
    pack(burst, [whole, whole], [0, 1])
    assert (np.concatenate(before) == burst.whole[:count + 5]).all()
    burst.whole[:count + 5] += np.ones((), dtype)
    unpack(burst, [whole, whole], [0, 1])
    for array, out, old in zip(arrays, outs, before):
        assert (array == old).all() and (out == old + np.ones((), dtype)).all()


@pytest.mark.parametrize("count", [5, LONG])
def test_factors_go_in_and_come_out(count):
    arrays = [np.arange(count, dtype=np.float64), np.ones(2)]
    outs = [np.zeros(count), np.zeros(2)]
    owners = [operation(arrays[:1], outs[:1], prescale=2.0, postscale=0.25), operation(arrays[1:], outs[1:])]
    burst = burst_of(arrays, scaled=True)
    pack(burst, owners, [0, 0])
    assert (burst.views[0] == 2 * np.arange(count)).all() and (burst.views[1] == 1).all() and (arrays[0] == np.arange(count)).all()
    unpack(burst, owners, [0, 0])
    assert (outs[0] == np.arange(count) / 2).all() and (outs[1] == 1).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_that_has_joined_adds_zeros_and_takes_nothing(scaled):
    array, out = np.ones(3, np.int16), np.zeros(3, np.int16)
    burst = burst_of([array, array], scaled=scaled)
    owners = [None, operation([array], [out])]
    pack(burst, owners, [0, 0])
    assert burst.whole[:6].tolist() == [0, 0, 0, 1, 1, 1]
    unpack(burst, owners, [0, 0])
    assert out.tolist() == [1, 1, 1]


# ----------------------------------------------------------------- factors

SCALES = [
    ("int8", [-3, 3, 5, 100], 0.5, [-1, 1, 2, 50]),
    ("uint16", [65535, 3], 1 / 3, [21845, 1]),
    ("int64", [2 ** 52 + 1, -7], 2.0, [2 ** 53 + 2, -14]),
    ("int32", [7, -7], -0.1, [0, 0]),
    ("float32", [1.5, -2], 0.25, [0.375, -0.5]),
    ("complex64", [1 + 2j], 0.5, [0.5 + 1j]),
    (">f4", [3.0], 2.0, [6.0]),
    (">i4", [-3], 0.5, [-1]),
    ("bool", [True, False], 0.5, [True, False]),
]


@pytest.mark.parametrize(("dtype", "values", "factor", "expected"), SCALES, ids=[row[0] for row in SCALES])
def test_factors_of_every_kind(dtype, values, factor, expected):
    source = np.array(values, dtype)
    for target in (np.zeros_like(source), source):
        scale(np, target, source, factor)
        assert target.dtype == dtype and target.tolist() == expected


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_narrow_floats_are_scaled_in_float32(dtype):
    source = np.arange(1, 200).astype(dtype)
    target, by = np.zeros_like(source), 1.0 / 300.0
    scale(np, target, source, by)
    assert (target == (source.astype(np.float32) * np.float32(by)).astype(dtype)).all()
    assert (target != source * np.array(by, dtype)).any(), "a factor in the narrow dtype would do as well"


def test_factors_do_not_widen_float32():
    source, by = np.random.default_rng(1).random(1000, np.float32), 1 / 3
    target = np.zeros_like(source)
    scale(np, target, source, by)
    assert (target == source * np.float32(by)).all()
    assert (target != (source.astype(np.float64) * by).astype(np.float32)).any()


# ----------------------------------------------------------------- settings

GOOD = [
    ("MPIRING_FUSION_THRESHOLD", "4M", "fusion_threshold", 4 << 20),
    ("MPIRING_FUSION_THRESHOLD", " 64k ", "fusion_threshold", 64 << 10),
    ("MPIRING_FUSION_THRESHOLD", "0", "fusion_threshold", 0),
    ("HOROVOD_FUSION_THRESHOLD", "134217728", "fusion_threshold", 128 << 20),
    ("MPIRING_CYCLE_TIME", "2.5", "cycle_time", 2.5e-3),
    ("HOROVOD_CYCLE_TIME", "1", "cycle_time", 1e-3),
    ("MPIRING_DETERMINISTIC", "1", "deterministic", True),
    ("MPIRING_DETERMINISTIC", "0", "deterministic", False),
    ("MPIRING_TIMELINE", "/tmp/a.json", "timeline", "/tmp/a.json"),
    ("HOROVOD_TIMELINE", "b.json", "timeline", "b.json"),
    ("HOROVOD_TIMELINE", "DYNAMIC", "timeline", ""),
    ("MPIRING_STALL_SECONDS", "0.5", "stall_seconds", 0.5),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_seconds", 30.0),
    ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_seconds", 0.0),
    ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_seconds", 60.0),
    ("MPIRING_TIMEOUT", "7", "timeout", 7.0),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "timeout", 0.0),
]


def test_every_variable_is_tried_here():
    known = {variable for found in VARIABLES.values() for variable, _ in found}
    assert known == {variable for variable, *_ in GOOD} == {variable for variable, _, _ in BAD}
    assert list(VARIABLES) == list(Settings.__dataclass_fields__)


@pytest.mark.parametrize(("variable", "text", "name", "value"), GOOD, ids=[f"{row[0]}={row[1]}" for row in GOOD])
def test_variables(variable, text, name, value):
    found = read({}, {variable: text})
    assert getattr(found, name) == value and type(getattr(found, name)) is type(getattr(Settings(), name))
    assert found == Settings(**{name: value}), "nothing else is touched"


def test_defaults():
    assert read({}, {}) == Settings() == Settings(FUSION_THRESHOLD, CYCLE_TIME, False, "", 60.0, 300.0)
    assert read(dict.fromkeys(Settings.__dataclass_fields__), {variable: "  " for variable, *_ in GOOD}) == Settings()


@pytest.mark.parametrize("name", VARIABLES)
def test_arguments_come_before_variables_and_ours_before_horovods(name):
    first = {name: [(variable, text, value) for variable, text, field, value in GOOD if field == name and value
                    != getattr(Settings(), name)] for name in VARIABLES}[name]
    variables = dict.fromkeys(variable for variable, _ in VARIABLES[name])
    environ = {variable: text for variable, text, _ in reversed(first)}
    expected = {variable: value for variable, _, value in reversed(first)}
    while environ:
        winner = next(variable for variable in variables if variable in environ)
        assert getattr(read({}, environ), name) == expected[winner]
        given = {"timeline": "mine.json", "deterministic": False}.get(name, 3)
        assert getattr(read({name: given}, environ), name) == given
        del environ[winner]


def test_the_stall_check_is_off_where_horovods_switch_says_so():
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "30"}
    assert read({}, environ).stall_seconds == 0
    assert read({}, {**environ, "HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_seconds == 30
    assert read({}, {**environ, "MPIRING_STALL_SECONDS": "5"}).stall_seconds == 5


BAD = [
    ("MPIRING_FUSION_THRESHOLD", "much", "a number of bytes such as"),
    ("HOROVOD_FUSION_THRESHOLD", "-1", "a number of bytes such as"),
    ("MPIRING_CYCLE_TIME", "1 ms", "a number of milliseconds"),
    ("HOROVOD_CYCLE_TIME", "-1", "it must be 0 or more, and finite"),
    ("MPIRING_DETERMINISTIC", "2", "0 or 1"),
    ("MPIRING_STALL_SECONDS", "nan", "it must be 0 or more, and finite"),
    ("HOROVOD_STALL_CHECK_DISABLE", "perhaps", "0 or 1"),
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "x", "a number of seconds"),
    ("MPIRING_TIMEOUT", "inf", "it must be 0 or more, and finite"),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1,5", "a number of seconds"),
    ("MPIRING_TIMELINE", "", ""),
    ("HOROVOD_TIMELINE", "", ""),
]
"""Variables, what cannot be meant, and why; any text is a file's name."""


@pytest.mark.parametrize(("variable", "text", "why"), [row for row in BAD if row[1]], ids=[row[0] for row in BAD if row[1]])
def test_what_is_wrong_with_a_variable(variable, text, why):
    with pytest.raises(ValueError, match=rf"^{variable} is .*{why}"):
        read({}, {variable: text})


@pytest.mark.parametrize(("name", "value", "error"), [
    ("fusion_threshold", "many", TypeError), ("fusion_threshold", -1, ValueError), ("fusion_threshold", [1], TypeError),
    ("cycle_time", -0.5, ValueError), ("cycle_time", float("inf"), ValueError), ("timeline", 5, TypeError),
    ("stall_seconds", None.__class__, TypeError), ("timeout", float("nan"), ValueError)], ids=str)
def test_what_is_wrong_with_an_argument(name, value, error):
    with pytest.raises(error, match=f"^{name} is "):
        read({name: value}, {})


def test_a_threshold_without_end_is_a_wrong_argument():
    with pytest.raises((TypeError, ValueError), match=r"^fusion_threshold is "):
        read({"fusion_threshold": float("inf")}, {})


def test_rank_0s_count_where_ranks_must_agree():
    everybody = [Settings(100, 0.5, True, "zero.json", 1.0, 2.0), Settings()]
    found = agree({"fusion_threshold": 7, "timeline": "mine.json", "stall_seconds": 3, "timeout": 4},
                  SimpleNamespace(allgather=lambda mine: everybody))
    assert found == Settings(100, 0.5, True, "mine.json", 3.0, 4.0)


def test_what_is_wrong_on_one_rank_is_an_error_on_all():
    def allgather(mine):
        seen.append(mine)
        return [Settings(), ValueError("timeout is -1.0: it must be 0 or more")]

    for given_ in ({}, {"timeout": "soon"}):
        seen = []
        with pytest.raises(ValueError, match=r"^rank 1: timeout is -1\.0"):
            agree(given_, SimpleNamespace(allgather=allgather))
        assert len(seen) == 1


# ----------------------------------------------------------------- texts

@pytest.mark.parametrize(("description", "text"), [
    (Description("barrier"), "barrier"),
    (allreduce((3, 4)), "allreduce of float32 (3, 4) by SUM"),
    (allreduce((3,), op="MAX", device=True), "allreduce of float32 (3,) on a GPU by MAX"),
    (allreduce((), prescale=0.5, postscale=2.0), "allreduce of float32 () by SUM prescale 0.5 postscale 2.0"),
    (allreduce((3,), (4, 1)), "allreduce of 2 arrays (float32 (3,), float32 (4, 1)) by SUM"),
    (Description("allgather", (">i4",), ((None, 5),)), "allgather of >i4 (*, 5)"),
    (Description("broadcast", ("int8",), ((2,),), root=0), "broadcast of int8 (2,) from root 0"),
    (Description("reduce_scatter", ("int8",), ((2,),), "SUM"), "reduce scatter of int8 (2,) by SUM"),
], ids=lambda value: str(value)[:30])
def test_descriptions_as_messages_write_them(description, text):
    assert str(description) == text


def test_keys_and_handles_as_messages_write_them():
    assert shown("a'b") == '"a\'b"' and shown(7) == "unnamed operation 7"
    made = operation([np.ones(3)], [None])
    made.key = "grad"
    assert repr(made) == "<allreduce 'grad': under way>"
    made.done = True
    assert repr(made) == "<allreduce 'grad': done>"
    made.error = ValueError()
    assert repr(made) == "<allreduce 'grad': failed>"


def test_what_is_given_up_lets_go_of_the_callers_arrays():
    array, out = np.ones(3), np.zeros(3)
    made = operation([array], [out])
    made.give_up(TimeoutError())
    array[:] = 5
    made.outs[0][...] = made.arrays[0]
    assert made.arrays[0].tolist() == [1, 1, 1] and out.tolist() == [0, 0, 0] and made.given_up


# ----------------------------------------------------------------- many arrays as one vector

@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50), st.data())
def test_blocks_cover_the_range_once(counts, block, data):
    start = data.draw(st.integers(0, sum(counts)))
    length = data.draw(st.integers(0, sum(counts) - start))
    found = list(blocks(counts, start, length, block))
    places = np.cumsum([0, *counts])
    assert sorted(places[array] + at for pieces in found for array, first, count in pieces
                  for at in range(first, first + count)) == list(range(start, start + length))
    for pieces in found:
        assert pieces and all(piece.length > 0 and piece.start + piece.length <= counts[piece.array] for piece in pieces)
        assert sum(piece.length for piece in pieces) <= block


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30), st.integers(20, 50))
def test_short_arrays_share_blocks_as_long_as_they_fit(counts, block):
    found = [[piece.length for piece in pieces] for pieces in blocks(counts, 0, sum(counts), block)]
    assert [length for pieces in found for length in pieces] == counts
    assert all(sum(pieces) + following[0] > block for pieces, following in pairwise(found))


def test_a_long_array_has_blocks_of_its_own_but_for_its_end():
    assert [[piece.length for piece in pieces] for pieces in blocks([2, 2, 17, 2, 2], 0, 25, 8)] == [[8], [8], [2, 2, 1, 2], [2]]


@pytest.mark.parametrize("count", [1, 2])
def test_a_block_has_no_more_pieces_than_one_call_of_the_kernel_takes(count):
    found = list(blocks([count] * (3 * PIECES + 5), 0, count * (3 * PIECES + 5), 1 << 20))
    assert [len(pieces) for pieces in found] == [PIECES] * 3 + [5]


def test_examples_in_docstrings():
    assert all(doctest.testmod(module).failed == 0 and doctest.testmod(module).attempted for module in (bursts, vectored))
