"""The choice of an algorithm: tables, overrides, keys and files; without MPI."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import mpiring
from mpiring import select
from mpiring.__main__ import main
from mpiring.algorithms.registry import ALGORITHMS, COLLECTIVES, names
from mpiring.algorithms.setting import Setting
from mpiring.analysis.machines import find_machine, with_ranks_per_node
from mpiring.analysis.verify import prove
from mpiring.commands.prices import Prices
from mpiring.select import NATIVE, SHARED, Key, Row, Span, Table, parse_override

TABLES = Path(mpiring.__file__).parent / "tables"
KEY = Key("Open MPI", "5.0.11", 1, (8,), "amd-epyc-2")
SIZES = [0, 1, 256, 4096, 4097, 8192, 32768, 32769, 1 << 18, 1 << 20, (1 << 20) + 1, 64 << 20, 1 << 40]


def anything(name):
    return True


def chosen(table, nbytes, *, collective="allreduce", kind="ordinary", ranks=8, nodes=1, allowed=anything):
    return table.choose(collective, kind, ranks, nodes, nbytes, allowed)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No test reads this user's tables, or override."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in (select.VARIABLE, select.TABLE):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "cache" / "mpiring"


def test_the_first_row_that_fits_and_its_first_algorithm_that_is_allowed():
    table = Table((Row("allreduce", "ordinary", ("native", "ring"), 1024), Row("allreduce", "ordinary", ("shared", "tree"))))
    assert [chosen(table, nbytes) for nbytes in (0, 1024, 1025)] == ["native", "native", "shared"]
    assert chosen(table, 8, allowed=lambda name: name != "native") == "ring"
    assert chosen(table, 8, allowed=lambda name: name == "tree") == "tree", "rows further down offer more"
    assert table.preferences("allreduce", "ordinary", 8, 1, 8) == ["native", "ring", "shared", "tree"]
    with pytest.raises(ValueError, match=r"allreduce of 2048 bytes \(ordinary arrays\) on 8 ranks of 1 node\(s\): none of shared, "
                                         r"tree can do it \(table: shipped\)"):
        chosen(table, 2048, allowed=lambda name: name == "ring")
    with pytest.raises(ValueError, match="no algorithm is left"):
        chosen(table, 8, collective="reduce")


def test_rows_are_for_ranks_nodes_ranks_of_a_node_and_libraries():
    table = Table((Row("reduce", "shared", ("native",), library="Intel"),
                   Row("reduce", "shared", ("tree",), ranks=Span(5, 8)),
                   Row("reduce", "shared", ("shared",), nodes=Span(2), per_node=Span(2)),
                   Row("reduce", "shared", ("pipelined_tree",)))).for_library("Open MPI")
    for ranks, nodes, name in ((4, 1, "pipelined_tree"), (5, 1, "tree"), (8, 8, "tree"), (9, 9, "pipelined_tree"), (9, 8, "shared"),
                               (4, 2, "shared")):
        assert chosen(table, 8, collective="reduce", kind="shared", ranks=ranks, nodes=nodes) == name
    row = Row("reduce", "shared", ("native",), library="Intel")
    assert len(table.rows) == 3 and Table((row,)).for_library("Intel MPI").rows == (row,)


def test_a_table_can_be_sent():
    table = select.load(KEY).with_override(parse_override("ring"))
    chosen(table, 8, allowed=anything)
    assert pickle.loads(pickle.dumps(table)) == table


@pytest.mark.parametrize("kind", select.KINDS)
@pytest.mark.parametrize("library", ["Intel MPI", "Another"])
def test_the_shipped_table_has_something_for_every_call(kind, library):
    table = select.shipped().for_library(library)
    for collective, ranks, nodes, nbytes in product(COLLECTIVES, range(1, 65), range(1, 5), SIZES):
        if nodes > ranks:
            continue
        offered = table.preferences(collective, kind, ranks, nodes, nbytes)
        assert set(names(collective)) <= set(offered), "messages always can"
        several = ranks > nodes and collective in ("allreduce", "reduce", "broadcast")
        assert NATIVE in offered and (SHARED in offered) == (kind != "device" and (nodes == 1 or several))


def ordered(collective, ranks):
    return {name for name in names(collective) if prove(ALGORITHMS[collective, name], Setting(ranks)).ordered}


def test_the_shipped_table_has_something_that_keeps_the_order_of_ranks():
    """Of reduce_scatter no schedule keeps it for more than two ranks."""
    for collective in ("allreduce", "reduce", "reduce_scatter"):
        for ranks in (1, 2, 3, 4, 7, 8, 16):
            keep = ordered(collective, ranks)
            for kind, nodes, nbytes in product(select.KINDS, range(1, min(ranks, 4) + 1), SIZES):
                offered = select.shipped().preferences(collective, kind, ranks, nodes, nbytes)
                assert keep <= set(offered) and (keep or NATIVE in offered)
                if keep:
                    assert chosen(select.shipped(), nbytes, collective=collective, kind=kind, ranks=ranks, nodes=nodes,
                                  allowed=keep.__contains__) in keep


def test_the_shipped_choice():
    for library, last in (("Open MPI", 8 << 10), ("MPICH", 8 << 10), ("Intel MPI", 256 << 10)):
        table = select.load(replace(KEY, library=library))
        assert (chosen(table, 4), chosen(table, last), chosen(table, last + 1)) == (NATIVE, NATIVE, SHARED)
        assert [chosen(table, nbytes, kind="shared") for nbytes in (1024, 16384, 64 << 20)] == [NATIVE, SHARED, SHARED]
        assert chosen(table, 4, allowed=lambda name: name != NATIVE) == SHARED
        assert [chosen(table, nbytes, kind="device") for nbytes in (1024, 64 << 20)] == [NATIVE, "ring"]
        assert [chosen(table, 64 << 20, ranks=ranks, nodes=4) for ranks in (4, 5, 8)] == ["ring", SHARED, SHARED]
        assert chosen(table, 64 << 20, ranks=4, nodes=4, kind="shared") == "ring"


def usual_prices(row):
    """Return the prices after which a shipped row is ordered, as the table's own text says."""
    tcp = find_machine(str(TABLES / "tcp.json"))
    if row.per_node == Span(1, 1):
        return Prices(with_ranks_per_node(tcp, 1), 8)
    if row.kind == "device":
        return Prices(find_machine("pcie"), 8) if row.nodes == Span(1, 1) else Prices(find_machine("dgx-h100"), 32)
    return Prices(find_machine(str(TABLES / "node.json")), 8) if row.nodes == Span(1, 1) else Prices(tcp, 16)


def test_the_shipped_order_of_schedules_is_that_of_the_cost_model():
    made = {}
    for row in select.shipped().rows:
        prices = made.setdefault((row.kind == "device", row.nodes, row.per_node), usual_prices(row))
        nbytes = row.upto // 4 if row.upto else 16 << 20
        pinned = () if row.upto else ("hierarchical", "ring") if row.kind == "device" else ("ring",)
        rest = [name for name in row.algorithms if name not in (NATIVE, SHARED, *pinned)]
        model = prices.all(row.collective, nbytes, rest)
        assert rest == sorted(rest, key=lambda name: round(model[name], 3)), row


def test_every_row_of_the_shipped_table_can_be_taken():
    """One below a row that fits the same calls with more bytes would never be the first."""
    seen = {}
    for row in select.shipped().rows:
        place = row.collective, row.kind, row.nodes, row.ranks, row.per_node
        for library, upto in seen.get(place, []):
            assert upto is not None or library not in ("", row.library)
            assert library or row.upto is None or upto < row.upto
        seen.setdefault(place, []).append((row.library, row.upto))
        assert len(set(row.algorithms)) == len(row.algorithms)


@pytest.mark.parametrize("text, expected", [
    ("allreduce:ring", {"allreduce": "ring", "reduce": "native"}),
    ("ring", {"allreduce": "ring", "allgather": "ring", "reduce_scatter": "ring", "reduce": "native", "alltoall": "native"}),
    (" ^native ; reduce : pipelined_tree ;", {"allreduce": "shared", "reduce": "pipelined_tree"}),
    ("broadcast:^native", {"broadcast": "shared", "allreduce": "native"}),
    ("allreduce:64-1K:tree;allreduce:bruck", {"allreduce": "tree"}),
    ("allreduce:64-255:tree;allreduce:bruck", {"allreduce": "bruck"}),
    ("allreduce:512-:tree", {"allreduce": "native"}), ("allreduce:-256:tree", {"allreduce": "tree"}),
    ("allreduce:-1K:^native;^shared", {"allreduce": "recursive_doubling", "reduce": "native"}),
    ("shared", {name: "shared" for name in COLLECTIVES}), ("", {"allreduce": "native"}),
])
def test_overrides(text, expected):
    table = select.load(KEY).with_override(parse_override(text))
    assert {name: chosen(table, 256, collective=name) for name in expected} == expected


@pytest.mark.parametrize("text, words", [
    ("rign", "'rign': unknown algorithm 'rign' (did you mean 'ring'?); known: ring, tree"),
    ("auto", "'auto': unknown algorithm 'auto'"), ("allreduce:auto", "unknown algorithm 'auto' for allreduce"),
    ("alreduce:ring", "unknown collective 'alreduce' (did you mean 'allreduce'?)"),
    ("allreduce:ring;allgather:tree", "'allgather:tree': unknown algorithm 'tree' for allgather; known: ring, bruck, native, sh"),
    ("allreduce:64Q-:ring", "'64Q' is not a size"), ("allreduce:64K:ring", "'64K' is not a range of bytes such as 64K-1M"),
    ("allreduce:1M-64K:ring", "'1M-64K' ends before it begins"), ("allreduce:-:ring", "'-' is not a range"),
    ("allreduce:1-2:3:ring", "more than COLLECTIVE:LO-HI:ALGORITHM"), ("^", "names no algorithm"), ("^^ring", "'^ring'"),
])
def test_wrong_overrides(text, words):
    with pytest.raises(ValueError) as caught:
        parse_override(text)
    assert words in str(caught.value) and str(caught.value).startswith("MPIRING_ALGORITHM: '")


def test_what_an_override_leaves_nothing_of_says_so():
    table = select.load(KEY).with_override(parse_override("allreduce:ring"))
    with pytest.raises(ValueError, match=r"none of ring can do it \(table: shipped; MPIRING_ALGORITHM is 'allreduce:ring'\)"):
        chosen(table, 8, allowed=lambda name: name == "tree")
    with pytest.raises(ValueError, match=r"no algorithm is left .*'ring;\^ring'"):
        chosen(table.with_override(parse_override("ring;^ring")), 8)


def test_the_environment_overrides(monkeypatch):
    assert select.override_setting() == select.Override()
    monkeypatch.setenv(select.VARIABLE, "tree")
    assert chosen(select.load(KEY).with_override(select.override_setting()), 8) == "tree"


def test_keys_and_their_files(cache):
    assert select.cache_path(KEY) == cache / "open-mpi-5.0.11_1x8_amd-epyc-2.json"
    uneven = Key("Intel MPI", "2021.18.1", 4, (8, 4, 8, 8), "Xeon Gold 6248 / 40")
    assert select.cache_path(uneven).name == "intel-mpi-2021.18.1_3x8+1x4_xeon-gold-6248-40.json"
    assert len({select.cache_path(replace(KEY, **change)) for change in (
        {}, {"version": "5.0.12"}, {"library": "MPICH"}, {"ranks_per_node": (4,)}, {"nodes": 2, "ranks_per_node": (4, 4)},
        {"processor": "amd-epyc-4"})}) == 6
    with pytest.raises(ValueError, match="ranks_per_node has 1 entries for 2 nodes"):
        Key("MPICH", "5", 2, (8,), "x")
    assert select.key_for(("MPICH", (5, 0, 2)), [0, 0, 1]) == Key("MPICH", "5.0.2", 2, (2, 1), select.processor())
    assert select.processor().endswith(f"-{os.cpu_count()}") and select.processor() == select.slug(select.processor())


def test_where_tables_are_kept(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for given in ("", "relative/folder"):                # which the XDG specification says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert select.cache_folder() == Path("/home/someone/.cache/mpiring")
    monkeypatch.setenv("HOME", "nowhere")
    assert select.cache_folder() is None and select.load(KEY).source == "shipped"
    with pytest.raises(ValueError, match="neither XDG_CACHE_HOME nor a home directory is known"):
        select.cache_path(KEY)


def measured():
    times = {1024: {"native": 10.0, "tree": 12.0, "ring": 40.0}, 4096: {"native": 21.0, "tree": 20.0},
             16384: {"native": 90.0, "tree": 30.0}}
    return Table(tuple(select.rows_from(times, True, collective="allreduce", kind="ordinary", ranks=Span(8, 8))), about="mine")


def test_a_measured_table_stands_above_the_shipped_one():
    assert select.load(KEY).source == "shipped"
    path = select.cache_path(KEY)
    select.store(measured(), path)
    table = select.load(KEY)
    assert (table.source, table.about) == (str(path), "mine") and os.listdir(path.parent) == [path.name]
    assert [chosen(table, nbytes) for nbytes in (8, 1024, 2048, 2049, 4096, 16384)] == ["native"] * 3 + ["tree"] * 3
    assert chosen(table, 1 << 20) == "shared", "larger than what was measured"
    assert chosen(table, 8, allowed=lambda name: name == "bruck") == "bruck"
    assert chosen(table, 4096, collective="reduce") == "native"
    assert chosen(select.load(replace(KEY, nodes=2, ranks_per_node=(4, 4))), 4096) == "native"


def test_a_table_of_ones_own_takes_the_place_of_the_measured_one(tmp_path, monkeypatch, capsys):
    select.store(replace(measured(), about="theirs"), select.cache_path(KEY))
    select.store(measured(), tmp_path / "mine.json")
    monkeypatch.setenv("MPIRING_TABLE", str(tmp_path / "mine.json"))
    table = select.load(KEY)
    assert (table.source, table.about) == (str(tmp_path / "mine.json"), "mine")
    assert chosen(table, 4096) == "tree" and chosen(table, 1 << 20) == "shared"
    assert f"table: {tmp_path / 'mine.json'}" in shown(capsys, "--bytes 1K")
    monkeypatch.setenv("MPIRING_TABLE", str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"other\.json: cannot be read: No such file or directory"):
        select.load(KEY)


def test_rows_and_their_files_say_the_same(cache):
    row = Row("reduce", "device", ("tree",), 100, Span(2), Span(1, 4), Span(3, 3), "MPICH")
    table = replace(measured(), rows=(*measured().rows, row))
    select.store(table, cache / "t.json")
    assert replace(select.read(cache / "t.json"), source="shipped") == table
    text = (cache / "t.json").read_text()
    assert '"nodes": "2-", "ranks": "1-4", "per_node": "3", "bytes": "100"' in text
    assert '"measured_us": {"1K": {"native": 10.0' in text
    assert [select.short(nbytes) for nbytes in (0, 1, 1000, 1024, 1536, 3 << 20)] == ["0", "1", "1000", "1K", "1536", "3M"]


def test_few_rows_where_algorithms_are_about_as_fast():
    def rows(*entries):
        times = {1 << 2 * number: dict(zip(("ring", "tree", "bruck"), entry)) for number, entry in enumerate(entries, 10)}
        return [(row.algorithms, row.upto) for row in select.rows_from(times, True, collective="allreduce", kind="ordinary")]

    assert rows((100, 101, 300), (101, 100, 300), (100, 102, 300)) == [(("ring", "tree", "bruck"), None)]
    assert rows((100, 101, 300), (105, 100, 300), (110, 100, 300)) == [(("tree", "ring", "bruck"), None)], "as at later sizes"
    assert rows((100, 200), (100, 104), (104, 100)) == [(("ring", "tree"), 8 << 20), (("tree", "ring"), None)]
    assert rows((100, 110, 120), (100, 110), (100, 110)) == [(("ring", "tree", "bruck"), None)]


TREE = '{"rows": [{"collective": "reduce", "kind": "device", "algorithms": ["tree"], %s}]}'


@pytest.mark.parametrize("text, words", [
    ("{", "not JSON"), ("[]", "not an object with the key 'rows'"), ('{"rows": {}}', "not an object with the key 'rows'"),
    ('{"rows": [5]}', "rows[0]: not an object"), ('{"rows": [{"collective": "alreduce"}]}', "did you mean 'allreduce'?"),
    ('{"rows": [{"collective": "reduce", "kind": "host"}]}', "unknown kind 'host'; known: ordinary, shared, device"),
    ('{"rows": [{"collective": "reduce", "kind": "device"}]}', "key 'algorithms' is None, not a list of names"),
    ('{"rows": [{"collective": "reduce", "kind": "device", "algorithms": ["ring"]}]}', "unknown algorithm 'ring' for reduce"),
    (TREE % '"node": "1"', "did you mean 'nodes'?"), (TREE % '"nodes": "1-0"', "'1-0' ends before it begins"),
    (TREE % '"ranks": "few"', "'few' is not a range such as"), (TREE % '"bytes": "1X"', "'1X' is not a size"),
    (TREE % '"measured_us": 5', "key 'measured_us' is not"), (b"\xff\xfe", "not JSON"),
])
def test_a_broken_table_is_an_error_that_names_the_file(text, words):
    path = select.cache_path(KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        select.load(KEY)
    assert words in str(caught.value) and str(caught.value).startswith(f"{path}: ")


def test_a_table_that_cannot_be_read_is_an_error():
    path = select.cache_path(KEY)
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        select.load(KEY)


def test_a_table_that_cannot_be_written_leaves_the_old_one(cache, monkeypatch):
    path = select.cache_path(KEY)
    select.store(measured(), path)
    before = path.read_text()
    monkeypatch.setattr(select.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        select.store(Table(()), path)
    assert path.read_text() == before and os.listdir(path.parent) == [path.name]


def test_neither_mpi_nor_numpy():
    code = ("import sys; from mpiring import select; select.load(select.Key('MPICH', '5', 1, (2,), 'x')); "
            "print({'mpi4py', 'numpy'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
    code = "import sys; from mpiring.__main__ import main; main(['select', '--ranks', '2']); print('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.endswith("\nFalse\n")


def test_the_shipped_table_is_in_the_package():
    assert "mpiring = tables/*.json" in (TABLES.parent.parent / "setup.cfg").read_text()
    assert sorted(path.name for path in TABLES.iterdir()) == ["node.json", "shipped.json", "tcp.json"]


def shown(capsys, line, status=0):
    assert main(["select", *line.split()]) == status
    out, err = capsys.readouterr()
    assert bool(err) == bool(status)
    return out if status == 0 else err


def test_select_shows_the_table_in_force(capsys, monkeypatch):
    out = shown(capsys, "--collective allreduce")
    assert out.startswith("8 ranks on 1 node; table: shipped\nnothing measured for these ranks yet") and out.count("\n") == 15
    data = json.loads(shown(capsys, "--collective allreduce,reduce --kind ordinary,device --bytes 1K,1M --json"))
    assert data["source"] == "shipped" and [(entry["collective"], entry["kind"]) for entry in data["tables"]] == list(
        product(("allreduce", "reduce"), ("ordinary", "device")))
    line = data["tables"][0]["sizes"][1]
    assert line["bytes"] == 1 << 20 and line["algorithms"][0] == "shared" and line["measured_us"] == {}
    cpu = find_machine("cpu-node")
    assert line["predicted_us"]["shared"] == pytest.approx(1e6 * (6 * cpu.levels[0].alpha + (2 << 20) * cpu.gamma["default"]))
    monkeypatch.setenv(select.VARIABLE, "allreduce:ring")
    out = shown(capsys, "--collective allreduce --bytes 1K")
    assert "MPIRING_ALGORITHM: allreduce:ring" in out and "1 KiB  ring" in out
    out = shown(capsys, "--collective allreduce --ranks 16 --nodes 4 --bytes 1M --kind shared --machine ethernet-1g")
    assert "16 ranks on 4 nodes" in out and "predicted on ethernet-1g" in out


def test_select_shows_measured_times(capsys):
    key = Key("Open MPI", "5.0.11", 1, (8,), select.processor())
    select.store(measured(), select.cache_path(key))
    out = shown(capsys, "--collective allreduce --bytes 1K,1M")
    assert f"table: {select.cache_path(key)}" in out and "nothing measured" not in out
    assert out.splitlines()[-2].split()[:7] == ["1", "KiB", "native", "3.85", "us", "10", "us"]
    for line in ("--ranks 4", "--library MPICH", "--ranks 8 --nodes 2"):
        assert "table: shipped" in shown(capsys, f"{line} --bytes 1K")
    select.store(measured(), select.cache_path(replace(key, library="MPICH")))
    assert "error: --library says not which: there are mpich-5.0.11_1x8_" in shown(capsys, "--bytes 1K", status=2)
    assert f"table: {select.cache_path(key)}" in shown(capsys, "--library open-mpi --bytes 1K")


def test_select_shows_what_the_model_gives(capsys):
    out = shown(capsys, "--model cpu-node --collective allreduce")
    assert out.startswith("by the cost model for 8 ranks on cpu-node") and " shared " in out and NATIVE not in out
    data = json.loads(shown(capsys, "--model ethernet-10g --ranks 8 --nodes 2 --collective broadcast --bytes 1K,64M --json"))
    assert {(row["nodes"], row["ranks"]) for row in data["rows"]} == {("2", "8")}
    assert all({"tree", SHARED} <= set(row["algorithms"]) for row in data["rows"])
    data = json.loads(shown(capsys, "--model ethernet-10g --ranks 8 --nodes 2 --collective allgather,alltoall --json"))
    assert not any(SHARED in row["algorithms"] for row in data["rows"])


@pytest.mark.parametrize("line, words", [
    ("--ranks 2 --nodes 4", "--nodes 4: 2 ranks cannot be on so many"), ("--kind host", "unknown kind 'host'"),
    ("--collective alreduce", "did you mean 'allreduce'?"), ("--machine cpu-nod", "did you mean 'cpu-node'?"),
    ("--machine cpu-node --nodes 2", "machine cpu-node: no path between"), ("--bytes many", "'many' is not a size"),
])
def test_wrong_use_of_select(line, words, capsys):
    assert words in shown(capsys, line, status=2)
