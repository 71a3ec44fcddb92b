"""The bench's parts that need no ranks: its command line, its inputs, its rows and its summary."""

import importlib.util

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring.algorithms import registry
from mpiring.bench import inputs, options
from mpiring.bench.report import Result, Table, summary, summary_lines
from mpiring.bench.subjects import Buffers
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
    (["--algorithms", "rign"], "unknown algorithm 'rign' for allreduce (did you mean 'ring'?); known: auto, shared, ring, tree"),
    (["--algorithms", "ring,ring"], "the same name twice"), (["-o", "BAND"], "op BAND has no meaning for dtype float32"),
    (["-f", "1"], "'1' is not a number above 1"), (["-n", "0"], "'0' is not a whole number from 1 on"),
    (["--algorithms", f"{__file__}:nothing"], "has no function nothing"), (["--algorithms", "no.py:f"], "there is no file no.py"),
    (["--plot", "a.pdf"], "does not end in .png or .svg"),
    (["--collective", "allgather", "--algorithms", "tree"], "unknown algorithm 'tree' for allgather"),
    (["--json", "no/such/folder/x.json"], "no/such/folder"), (["-b", "900000G"], "is more than this machine's memory"),
    (["--collective", "reduce", "-r", "1"], "root 1 is not one of 1 ranks"),
    (["--buffers", "borrowed"], "argument --buffers: invalid choice: 'borrowed'"),
    (["--collective", "reduce", "--algorithms", "plan"], "argument --algorithms: plan is for --collective allreduce, not reduce"),
    (["--collective", "allgather", "--bound"], "argument --bound: is for --collective allreduce, not allgather"),
    (["--collective", "allgather", "--peers"], "argument --peers: is for an allreduce with SUM of float32, float64, int32, int64, "
     "not allgather of float32"),
    (["--peers", "-o", "MAX"], "not allreduce MAX of float32"), (["--peers", "-d", "float16"], "not allreduce SUM of float16"),
])
def test_wrong_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv, quiet=False)
    assert caught.value.code == 2 and words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options.parse(argv, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_peers_that_are_not_installed_are_named_with_their_extra(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(SystemExit) as caught:
        parsed("--peers")
    assert caught.value.code == 2
    with pytest.raises(SystemExit):
        options.parse(["--peers"], quiet=False)
    assert "argument --peers: needs PyTorch: pip install 'mpiring[torch]'" in capsys.readouterr().err


def test_help_fits_a_terminal_and_names_what_can_be_compared(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        options.parse(["--help"], quiet=False)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for name in ("auto", "shared", "native", "comm", "plan", "FILE.py:NAME", "xnative", "bound%", "#wrong"):
        assert any(line.startswith(f"  {name} ") for line in text.splitlines()), name


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


@pytest.mark.parametrize("collective", registry.COLLECTIVES)
@pytest.mark.parametrize("inplace", [False, True])
def test_shared_buffers_are_given_back(collective, inplace, monkeypatch):
    made, freed = [], []

    def empty(count, dtype, comm):
        made.append(np.empty(count, dtype))
        return made[-1]

    monkeypatch.setattr(mpiring, "empty", empty, raising=False)
    monkeypatch.setattr(mpiring, "free", freed.append, raising=False)
    buffers = Buffers(collective, "SUM", np.dtype(np.int32), 5, MPI.COMM_SELF, inplace, buffers="shared")
    assert all(any(np.shares_memory(array, shared) for shared in made) for array in (buffers.send, buffers.recv))
    assert len(made) == (1 if buffers.inplace else 2)
    buffers.free()
    assert list(map(id, freed)) == list(map(id, made))
    buffers.free()
    assert len(freed) == len(made)


def result(algorithm="ring", nbytes=67108864, ratio=None, **more):
    time = {"median": 130123.4, "min": 1.0, "p99": 2.0}
    return Result("allreduce", algorithm, nbytes, nbytes // 4, "float32", "SUM", time, 0.5, 0.9, ratio, 0, **more)


def test_a_row_stands_under_its_heading():
    table = Table(["ring", "tree"], bound=False)
    line, = table.rows(result())
    assert len(line) == len(table.heading()) and line.split()[4] == "ring" and line.split()[-2:] == ["-", "0"]
    table = Table(["ring", "bound"], bound=True)
    line, = table.rows(result(ratio=1.5, bound_share=0.4321))
    assert len(line) == len(table.heading()) and line.split()[-3:] == ["1.50", "43.2", "0"]
    assert table.heading().split()[-3:] == ["xnative", "bound%", "#wrong"]


def test_a_row_says_what_auto_was_and_is_as_wide_as_that():
    table = Table(["auto", "ring"], bound=False)
    line, = table.rows(result("auto", ran="shared", path="one pass"))
    assert line.split()[4] == "auto:shared" and len(line) == len(table.heading())
    again, line = table.rows(result("auto", ran="recursive_doubling", path="messages"))
    assert again == "#" + table.heading()[1:] and len(again) == len(line) and line.split()[4] == "auto:recursive_doubling"
    line, = table.rows(result(ran="ring", path="messages"))
    assert line.split()[4] == "ring" and len(line) == len(again)


def test_the_summary_is_the_geometric_mean_of_every_size():
    measured = [result(name, nbytes, ratio) for nbytes, ratios in ((8, (0.5, 4, 1, 9)), (64 << 10, (8, 1, 1, 9)))
                for name, ratio in zip(("ring", "auto", "native", "bound"), ratios)]
    ring, auto = summary(measured)
    assert ring == {"algorithm": "ring", "native_ratio": 2.0, "worst": 0.5, "worst_bytes": 8}
    assert auto == {"algorithm": "auto", "native_ratio": 2.0, "worst": 1, "worst_bytes": 64 << 10}
    assert summary_lines([ring, auto]) == ["geometric mean of xnative: ring 2.00 (worst 0.50 at 8 B), "
                                           "auto 2.00 (worst 1.00 at 64 KiB)"]
    assert summary(measured[:4]) == summary([result(), result()]) == summary_lines([]) == []


def test_a_long_summary_is_cut_between_its_entries_only():
    lines = summary_lines([{"algorithm": f"own.py:f{i}", "native_ratio": 1.0, "worst": 0.5, "worst_bytes": 64} for i in range(9)])
    assert len(lines) > 1 and max(map(len, lines)) <= 130
    assert all(line.endswith(("),", ")")) for line in lines) and sum(line.count("(worst 0.50 at 64 B)") for line in lines) == 9


def test_algorithms_by_default_and_all():
    assert parsed().algorithms == ["auto", "ring", "tree", "native"]
    assert parsed("--algorithms", "all").algorithms == ["auto", "shared", *registry.names("allreduce"), "native"]
    assert parsed("--collective", "alltoall").algorithms == ["auto", "shared", "pairwise", "bruck", "native"]
    assert parsed("--algorithms", "comm,plan", "--bound").algorithms == ["comm", "plan", "bound"]
