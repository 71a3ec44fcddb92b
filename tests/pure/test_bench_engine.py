"""The parts of the engine's bench that need no ranks: its command line, its arrays, its rows and what it says."""

from random import Random

import pytest
from mpi4py import MPI

from mpiring.bench import cases, options
from mpiring.bench.cases import ALLREDUCE, BOTH, CASES, ENGINE, WORK, Arrays, within
from mpiring.bench.engine import CaseResult, Table, hidden, nothing_hides, summary, summary_lines
from mpiring.bench.subjects import COMM


def parsed(*argv):
    return options.parse(list(argv), quiet=True)


def test_cases_by_default_in_order_and_by_name():
    assert parsed().engine is None and parsed().maxbytes == 64 << 20
    every = parsed("--engine")
    assert (every.engine, every.maxbytes, every.work) == (["many_small", "resnet50", "single", "overlap"], 512 << 20, 50)
    assert parsed("--engine", "all", "-n", "5").engine == list(CASES)
    chosen = parsed("--engine", "overlap,single", "--work", "7", "-e", "1M", "--inplace")
    assert (chosen.engine, chosen.maxbytes, chosen.work, chosen.inplace) == (["overlap", "single"], 1 << 20, 7, True)


@pytest.mark.parametrize("argv, words", [
    (["--engine", "singel"], "argument --engine: unknown case 'singel' (did you mean 'single'?); known: many_small, resnet50, "
     "single, overlap"),
    (["--engine", ""], "argument --engine: unknown case ''; known: many_small"),
    (["--engine", "single,single"], "argument --engine: the same name twice"),
    (["--engine", "--collective", "reduce"], "argument --engine: its cases leave no choice of --collective"),
    (["--engine", "-d", "float64"], "argument --engine: its cases leave no choice of --datatype"),
    (["--engine", "-b", "16"], "argument --engine: its cases leave no choice of --minbytes"),
    (["--engine", "--plot", "a.svg"], "argument --engine: its cases leave no choice of --plot"),
    (["--engine", "--algorithms", "ring"], "argument --engine: its cases leave no choice of --algorithms"),
    (["--work", "5"], "argument --work: is for --engine overlap"),
    (["--engine", "single", "--work", "5"], "argument --work: is for --engine overlap"),
    (["--engine", "--work", "0"], "argument --work: '0' is not a whole number from 1 on"),
    (["--engine", "-e", "4"], "argument -e: 4 is less than -b 8"),
])
def test_wrong_command_lines(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        options.parse(argv, quiet=False)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_help_names_cases_and_columns(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--help"], quiet=False)
    text = capsys.readouterr().out
    for name in (*CASES, "xallreduce", "hidden%"):
        assert any(line.startswith(f"  {name} ") for line in text.splitlines()), name


def test_arrays_that_do_not_fit_are_left_out():
    sizes = {"a": 10, "large": 1000, "b": 10, "c": 10}
    assert within(sizes, 1 << 20) == sizes
    assert within(sizes, 80) == {"a": 10, "b": 10}
    assert within(sizes, 8) == {"a": 10}


@pytest.mark.parametrize("inplace", [False, True])
def test_wrong_elements_are_named_by_array_and_place(inplace):
    arrays = Arrays({"a": 3000, "b": 20000, "c": 3000}, MPI.COMM_SELF, inplace)
    assert arrays.nbytes == 4 * 26000
    arrays.reset()
    arrays.spoil()
    assert arrays.wrong()[0] == (0 if inplace else 26000)
    for given, out in arrays.pairs:
        assert (given is out) == inplace
        out[...] = given
    assert arrays.wrong() == (0, "")
    arrays.results[1][[7, 19]] += 1
    count, text = arrays.wrong()
    assert count == 2 and text.startswith("rank 0, array 'b', element 7: ")
    if inplace:
        arrays.reset()
        assert arrays.wrong() == (0, "")


def test_arrays_that_change_places_are_wrong():
    arrays = Arrays({f"small.{index}": 1024 for index in range(40)}, MPI.COMM_SELF, inplace=False)
    for first, second in ((0, 1), (3, 30), (10, 39)):
        for _, out in arrays.pairs:
            out[...] = 0
        for place, (_, out) in enumerate(arrays.pairs):
            out[...] = arrays.given[{first: second, second: first}.get(place, place)]
        assert arrays.wrong()[0] > 1000


def test_every_rank_and_every_run_has_an_order_of_its_own():
    orders = []
    for rank in range(2):
        arrays = Arrays({str(index): 1 for index in range(50)}, MPI.COMM_SELF, False, Random(rank))
        for _ in range(3):
            arrays.reset()
            assert sorted(arrays.order) == list(range(50))
            orders.append(tuple(arrays.order))
    assert len(set(orders)) == 6
    arrays = Arrays({"a": 1, "b": 1, "c": 1}, MPI.COMM_SELF, False)
    arrays.reset()
    assert arrays.order == [0, 1, 2]


class Recorder:
    """An engine that notes what is called; its sums are those of one rank."""

    def __init__(self):
        self.told = []

    def allreduce_async(self, array, out=None, *, name):
        out[...] = array
        self.told.append(name)
        return name

    def synchronize(self, handle):
        self.told.append(f"await {handle}")


def test_all_are_submitted_before_the_work_and_awaited_after_it():
    engine = Recorder()
    arrays = Arrays({"a": 5, "b": 6, "c": 7}, MPI.COMM_SELF, inplace=False)
    arrays.order = [2, 0, 1]
    cases.by_engine(engine, arrays, lambda: engine.told.append("work"))()
    assert engine.told == ["c", "a", "b", "work", "await c", "await a", "await b"]
    assert arrays.wrong() == (0, "")


@pytest.mark.parametrize("call", [cases.by_allreduce, cases.by_comm])
@pytest.mark.parametrize("inplace", [False, True])
def test_separate_calls_reduce_every_array(call, inplace):
    arrays = Arrays({"a": 5, "b": 6000, "c": 7}, MPI.COMM_SELF, inplace)
    arrays.reset()
    arrays.spoil()
    call(arrays)()
    assert arrays.wrong() == (0, "")


def test_the_search_ends_near_the_work(monkeypatch):
    """With an engine that moves 1 GB/s, and one that is too fast for the memory that the case may have."""
    setting = cases.Setting(Recorder(), MPI.COMM_SELF, False, 64 << 20, 0.01)
    monkeypatch.setattr(cases, "by_engine", lambda engine, arrays, meanwhile=None: arrays.nbytes)
    monkeypatch.setattr(cases, "_seconds", lambda nbytes, comm, reset=None: 1e-4 + nbytes / 1e9)
    assert cases._as_long(setting).nbytes == pytest.approx(1e7, rel=0.1)
    monkeypatch.setattr(cases, "_seconds", lambda nbytes, comm, reset=None: 1e-4 + nbytes / 1e12)
    assert cases._as_long(setting).nbytes == 64 << 20
    monkeypatch.setattr(cases, "_seconds", lambda nbytes, comm, reset=None: 1.0)
    assert cases._as_long(setting).nbytes == pytest.approx((1 << 20) / 100, rel=0.01)


def test_what_is_hidden():
    assert hidden({WORK: 50, ENGINE: 40, BOTH: 50}) == 1
    assert hidden({WORK: 40, ENGINE: 50, BOTH: 90}) == 0
    assert hidden({WORK: 50, ENGINE: 40, BOTH: 70}) == 0.5


@pytest.mark.parametrize("ranks, nodes, cores, hides", [(1, 1, 2, True), (2, 1, 2, False), (8, 1, 2, False), (1, 2, 2, True),
                                                        (4, 4, 2, True)])
def test_where_nothing_can_hide(ranks, nodes, cores, hides):
    assert (nothing_hides({"ranks_per_node": ranks, "nodes": nodes, "cores": cores}) == "") == hides


def result(case, subject, ratio=None, hides=None, wrong=0, busbw=1.5):
    return CaseResult(case, subject, 1000, 4096000, {"median": 130123.4, "min": 1.0, "p99": 2.0}, busbw, ratio, hides, wrong)


def test_a_row_stands_under_its_heading():
    table = Table()
    for found, cells in ((result("many_small", ENGINE, 5.127), ["1.500", "5.13", "-", "0"]),
                         (result("overlap", BOTH, None, 0.6543, 7, None), ["-", "-", "65.4", "7"]),
                         (result("overlap", WORK, None, None, None, None), ["-", "-", "-", "-"])):
        line, = table.rows(found)
        assert len(line) == len(table.heading()) and line.split()[-4:] == cells
        assert line.split()[:4] == [found.case, found.subject, "1000", "4096000"]


def test_the_summary_says_one_thing_of_each_case():
    found = summary([result("many_small", ENGINE, 5.127), result("many_small", ALLREDUCE, 1.0), result("many_small", COMM, 1.3),
                     result("resnet50", ALLREDUCE, 1.0), result("resnet50", ENGINE, 0.871), result("single", ENGINE, 0.05),
                     result("overlap", WORK), result("overlap", ENGINE), result("overlap", BOTH, None, 0.6543)])
    assert found[0] == {"case": "many_small", "allreduce_ratio": 5.127, "hidden": None}
    assert summary_lines(found) == ["many_small: 5.13 times as fast as separate calls", "resnet50: 87.1% of the busbw of one call",
                                    "single: 0.05 times as fast as mpiring.allreduce",
                                    "overlap: 65.4% of the shorter one of work and communication is hidden"]
    assert summary([]) == summary_lines([]) == []
