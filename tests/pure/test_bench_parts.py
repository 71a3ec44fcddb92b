"""The bench's parts that need no ranks: its command line, its inputs and its rows."""

import numpy as np
import pytest

from mpiring.algorithms import registry
from mpiring.bench import inputs, options
from mpiring.bench.report import Result, heading, row
from mpiring.runtime import ops


def parsed(*argv):
    return options.parse(list(argv), quiet=True)


def test_sizes():
    assert [options.a_size(text) for text in ("8", "64K", "16m", "1G", "4KB", "4KiB")] == [8, 65536, 16 << 20, 1 << 30, 4000, 4096]
    assert options.sizes(parsed("-b", "4", "-e", "1K", "-f", "4")) == [1, 4, 16, 64, 256]
    assert options.sizes(parsed("-b", "1K", "-e", "1K")) == [256]
    assert options.sizes(parsed("-b", "1", "-e", "3", "-d", "float64")) == [1]
    assert options.sizes(parsed())[-1] == 16 << 20 and options.sizes(parsed())[0] == 2


@pytest.mark.parametrize("argv, words", [
    (["-b", "many"], "'many' is not a size such as 8, 64K"), (["-b", "2M", "-e", "1M"], "argument -e: 1048576 is less"),
    (["-o", "mean"], "'mean' is not one of SUM"), (["-d", "float128x"], "'float128x' is not one of"),
    (["--algorithms", "rign"], "unknown algorithm 'rign' for allreduce (did you mean 'ring'?); known: ring, tree"),
    (["--algorithms", "ring,ring"], "the same name twice"), (["-o", "BAND"], "op BAND has no meaning for dtype float32"),
    (["-f", "1"], "'1' is not a number above 1"), (["-n", "0"], "'0' is not a whole number from 1 on"),
    (["--algorithms", f"{__file__}:nothing"], "has no function nothing"), (["--algorithms", "no.py:f"], "there is no file no.py"),
    (["--plot", "a.pdf"], "does not end in .png or .svg"),
    (["--collective", "allgather", "--algorithms", "tree"], "unknown algorithm 'tree' for allgather"),
    (["--json", "no/such/folder/x.json"], "no/such/folder"), (["-b", "900000G"], "is more than this machine's memory"),
    (["--collective", "reduce", "-r", "1"], "root 1 is not one of 1 ranks"),
])
def test_wrong_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv, quiet=False)
    assert caught.value.code == 2 and words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options.parse(argv, quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("op", ops.NAMES)
@pytest.mark.parametrize("dtype", [np.dtype(name) for name in options.DTYPES if name != "bfloat16"], ids=str)
def test_inputs_have_exact_results_in_any_order(op, dtype):
    try:
        operation = ops.find(ops.NAMES[op], dtype)
    except TypeError:
        return
    combine = getattr(np, operation.ufunc)
    for size in (1, 2, 8, 50):
        every = [inputs.pattern(op, dtype, rank, size) for rank in range(size)]
        one, other = every[0].copy(), every[-1].copy()
        for a, b in zip(every[1:], every[-2::-1]):
            one, other = combine(one, a).astype(dtype), combine(other, b).astype(dtype)
        assert (one == other).all()
        if op == "SUM" and dtype.kind != "b":
            assert (one == np.sum([vector.astype(np.clongdouble) for vector in every], axis=0)).all()
        assert len(np.unique(one)) > 1 or op in ("LOR", "LAND", "BAND", "BOR", "MAX", "MIN") or dtype.kind == "b"


def test_wrong_elements_are_counted_and_placed():
    base = inputs.pattern("SUM", np.dtype(np.float32), 1, 4)
    array = np.empty(3_000_000, np.float32)
    inputs.fill(array, base, 17)
    assert inputs.wrong(array, base, 17) == (0, -1)
    array[[1_234_567, 2_000_000]] += 1
    assert inputs.wrong(array, base, 17) == (2, 1_234_567)
    assert inputs.wrong(array, base, 18)[0] > 1_000_000


def test_a_row_stands_under_its_heading():
    time = {"median": 130123.4, "min": 1.0, "p99": 2.0}
    result = Result("allreduce", "ring", 67108864, 16777216, "float32", "SUM", time, 0.5, 0.9, None, 0)
    cells = row(result, 9).split()
    assert len(row(result, 9)) == len(heading(9)) and cells[4] == "ring" and cells[-2:] == ["-", "0"]


def test_algorithms_by_default_and_all():
    assert parsed().algorithms == ["ring", "tree", "native"]
    assert parsed("--algorithms", "all").algorithms == [*registry.names("allreduce"), "native"]
    assert parsed("--collective", "alltoall").algorithms == ["pairwise", "bruck", "native"]
