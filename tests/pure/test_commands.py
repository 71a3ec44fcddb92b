"""Commands: what they print, their exit statuses, and one line for what is wrong."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mpiring
from mpiring.__main__ import COMMANDS, main
from mpiring.algorithms.registry import ALGORITHMS
from mpiring.analysis.cost import simulate
from mpiring.analysis.machines import MACHINES, find_machine, to_json
from mpiring.commands import options
from mpiring.commands.verify import drawn


def ran(capsys, line, status=0):
    """Run a command line; return what it printed."""
    assert main(line.split()) == status
    out, err = capsys.readouterr()
    assert "Traceback" not in err and bool(err) == bool(status)
    return out if status == 0 else err


def test_help(capsys):
    out = ran(capsys, "--help")
    assert all(re.search(rf"^  {name} +\w", out, re.MULTILINE) for name in COMMANDS)
    for name in COMMANDS:
        out = ran(capsys, f"{name} --help")
        assert re.search(rf"example.*\n(.*\n)*  python -m mpiring {name} ", out)
    assert re.fullmatch(r"mpiring \S+\n", ran(capsys, "--version"))
    assert main([]) == 2 and capsys.readouterr().out == ran(capsys, "--help")


@pytest.mark.parametrize("line, words", [
    ("simulat", "unknown command 'simulat' (did you mean 'simulate'?); known: algorithms, verify, simulate, draw, fit"),
    ("verify rign", "unknown algorithm 'rign' for allreduce (did you mean 'ring'?)"),
    ("verify --collective alreduce", "unknown collective 'alreduce' (did you mean 'allreduce'?)"),
    ("verify ring --all", "--all leaves no algorithm to name"),
    ("verify --ranks 5-2", "argument --ranks: '5-2' is not a number of ranks such as 8, 2-64 or 3,5,7"),
    ("verify --ranks 0", "is not a number of ranks"), ("verify --draw 5000", "--draw 5000: there are 960 numbers from 65 to 1024"),
    ("verify --ranks 3 --root 3", "root 3 is not one of 3 ranks"), ("verify --per-node 2 --nodes 2", "not allowed with"),
    ("simulate --machine p3 --bytes 1MB", "unknown machine 'p3'"),
    ("simulate --machine etherent-10g --bytes 1MB", "did you mean 'ethernet-10g'?"),
    ("simulate --machine dgx2", "--bytes is missing, or --model"),
    ("simulate --bytes 1MB", "--machine is missing; ready-made: p3.16xlarge"),
    ("simulate --machine dgx2 --bytes much", "'much' is not a size such as 8, 64K, 64KiB (binary) or 160MB (decimal)"),
    ("simulate --machine dgx2 --model resnet5", "did you mean 'resnet50'?"),
    ("simulate --machine pcie --bytes 1MB --ranks 9", "machine pcie: no path between rank 0 and rank 8"),
    ("simulate --machine no.json --bytes 1MB", "no.json: cannot be read: No such file or directory"),
    ("simulate --machine dgx2 --bytes 1MB --rnaks 4", "unrecognized arguments: --rnaks 4"),
    ("draw", "which algorithm? allreduce has ring, tree,"), ("draw rign", "did you mean 'ring'?"),
    ("draw ring --out ring.pdf", "'ring.pdf' does not end in .svg or .png"),
    ("draw ring --picture spacetime", "--picture spacetime needs --out FILE.svg or FILE.png"),
    ("draw ring --picture spacetime --out a.svg", "--picture spacetime needs --machine"),
    ("draw ring --picture ranks --out a.svg --machine dgx2", "--picture ranks needs --bytes"),
    ("draw --picture buckets --out a.svg --machine dgx2", "--picture buckets needs --model: bert-base, resnet50"),
    ("fit no.json", "no.json: cannot be read: No such file or directory"),
])
def test_wrong_use_is_one_line_and_status_2(line, words, capsys):
    err = ran(capsys, line, status=2)
    assert words in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("text, words", [
    ("{", "not JSON"), ("[]", "not an object"), ('{"name": "a"}', "key 'levels', 'ranks' is missing"),
    ('{"name": "a", "levels": [], "gamma": {"default": 0}, "ranks": 2}', "it has no level"),
    ('{"name": "a", "levels": [{"name": "x", "group": null, "alpha": 1, "beta": 0}], "gamma": {"default": 0}, "ranks": 2}',
     "beta is 0, not a time in seconds above 0")])
def test_a_machine_file_that_is_wrong(text, words, capsys, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert words in ran(capsys, f"simulate --machine {path} --bytes 1MB", status=2)


def test_sizes():
    assert [options.a_size(text) for text in ("4096", "160MB", "64K", "64KiB", "1.5GB", "2g", "10 kb", "8B")] == [
        4096, 160_000_000, 65536, 65536, 1_500_000_000, 2 << 30, 10_000, 8]
    assert options.many_ranks("2-4,8,3") == [2, 3, 4, 8]


def test_simulate(capsys):
    out = ran(capsys, "simulate --machine p3.16xlarge --bytes 160MB --algorithms ring,tree,multi_ring")
    assert "2 * 160 MB / (3 links * 18 GB/s) = 5.93 ms, which takes (n-1)/n as 1" in out
    assert re.findall(r"^  (ring|tree|multi_ring) ", out, re.MULTILINE) == ["multi_ring", "ring", "tree"]
    data = json.loads(ran(capsys, "simulate --machine p3.16xlarge --bytes 160MB --ranks 4 --algorithms tree,ring --json"))
    assert (data["machine"], data["bytes"], data["ranks"]) == ("p3.16xlarge", 160_000_000, 4)
    first, second = data["results"]
    assert {"algorithm", "seconds", "steps", "busiest_link_bytes"} <= set(first) and first["seconds"] < second["seconds"]
    assert first["seconds"] == simulate(first["algorithm"], 160_000_000, "p3.16xlarge", 4).seconds
    out = ran(capsys, "simulate --machine ethernet-10g --per-node 4 --bytes 1M --collective allgather")
    assert "allgather of 1 MiB, float32, on 32 ranks" in out and "textbook" not in out


def test_simulate_lists_machines_with_sources(capsys):
    out = ran(capsys, "simulate --list")
    assert all(f"{name}: " in out for name in MACHINES) and "NVIDIA H100 data sheet" in out


def test_simulate_takes_a_machine_of_ones_own(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(to_json(replace(find_machine("cpu-node"), name="mine", ranks=3)))
    data = json.loads(ran(capsys, f"simulate --machine {path} --bytes 64K --algorithms ring --json"))
    assert data["machine"] == "mine" and data["ranks"] == 3


def test_simulate_a_model(capsys):
    line = "simulate --machine ethernet-10g --ranks 64 --model resnet50 --algorithms ring"
    out = ran(capsys, line)
    assert "161 gradients, 102 MB of float32" in out and out.count("<- best") == 1 and "16 MiB" in out
    assert max(map(len, out.splitlines())) <= 120
    data = json.loads(ran(capsys, f"{line} --json"))
    assert {"bucket_bytes", "buckets", "exposed"} <= set(data["results"][0]) and data["model"] == "resnet50"


def test_verify(capsys):
    out = ran(capsys, "verify ring tree --ranks 2-5").splitlines()
    assert out[1].split("  ")[1:] and re.fullmatch(r"  ring +2-5 +2 to 8 +4 to 40 +1 to 8/5  at 2", out[1])
    assert re.fullmatch(r"  tree +2-5 +2 to 6 +2 to 8 +1 to 3  yes", out[2])
    data = json.loads(ran(capsys, "verify hierarchical --ranks 8 --nodes 2 --json"))
    assert data == [{"algorithm": "hierarchical", "collective": "allreduce", "ranks": 8, "rounds": 8, "messages": 64, "sent": 1.75,
                     "ordered": False}]
    out = ran(capsys, "verify --all --ranks 3 --jobs 2 --pieces 2")
    assert len(out.splitlines()) == len(ALGORITHMS) + 1 and "alltoall bruck" in out


def test_a_wrong_schedule_is_status_1_with_its_place(capsys, monkeypatch):
    ring = ALGORITHMS["allreduce", "ring"]
    wrong = replace(ring, schedule=lambda rank, n: list(ring.schedule(rank, n))[:-1])
    monkeypatch.setitem(ALGORITHMS, ("allreduce", "ring"), wrong)
    assert main(["verify", "ring", "tree", "--ranks", "3-4"]) == 1
    out, err = capsys.readouterr()
    assert "WRONG at 3-4" in out and re.search(r"error: ring for 3 ranks: rank \d, .*chunk \d: ", err) and "  tree " in out
    assert re.match(r"error: wrong schedule: rank \d, ", ran(capsys, "draw ring --ranks 3", status=1))


def test_drawn_sizes_are_mostly_small():
    found = drawn(40, 1)
    assert found == drawn(40, 1) != drawn(40, 2) and len(set(found)) == 40
    assert 65 <= min(found) and max(found) <= 1024 and sum(ranks < 150 for ranks in found) > 25


def test_draw(capsys, tmp_path):
    out = ran(capsys, "draw ring --ranks 3")
    assert "    0  c2 +>1  c0 +>2  c1 +>0" in out
    assert "root 1" in ran(capsys, "draw tree --collective broadcast --ranks 3 --root 1")
    assert "on 2 nodes" in ran(capsys, "draw hierarchical --ranks 4 --per-node 2")
    pytest.importorskip("matplotlib")
    for picture in ("steps", "spacetime", "ranks", "buckets"):
        path = tmp_path / f"{picture}.svg"
        out = ran(capsys, f"draw ring --ranks 4 --picture {picture} --machine cpu-node --bytes 1M --model resnet50 --out {path}")
        assert out == f"wrote {path}\n" and path.read_text().count("<text") > 5


def bench(path, machine):
    results = [{"collective": "allreduce", "algorithm": name, "bytes": nbytes, "dtype": "float32",
                "time_us": {"median": simulate(name, nbytes, machine).seconds * 1e6}}
               for name in ("ring", "tree") for nbytes in (64, 4096, 1 << 18, 1 << 22)]
    path.write_text(json.dumps({"environment": {"ranks": 8, "nodes": 1, "ranks_per_node": 8}, "results": results}))


def test_fit(capsys, tmp_path):
    path, out = tmp_path / "bench.json", tmp_path / "mine.json"
    bench(path, replace(find_machine("cpu-node"), levels=(replace(find_machine("cpu-node").levels[0], bus=None),)))
    text = ran(capsys, f"fit {path} --out {out}")
    assert "4 points held out: median error" in text and "held out" in text and f"wrote {out}" in text
    assert "the fastest algorithm is the predicted one at 4 of 4 sizes" in text
    assert find_machine(str(out)).ranks == 8
    data = json.loads(ran(capsys, f"fit {path} --hold-out tree,4K --json"))
    assert data["median_error"] <= data["worst_error"] < 0.2
    assert sum(point["held_out"] for point in data["points"]) == 5 and "levels" in data["machine"]
    err = ran(capsys, f"fit {path} --hold-out rign", status=2)
    assert "'rign' is neither an algorithm of the bench (ring, tree) nor a size" in err
    assert "machine dgx2 has 16" in ran(capsys, f"fit {path} --machine dgx2", status=2)
    path.write_text("{}")
    assert "key 'environment' is missing" in ran(capsys, f"fit {path}", status=2)


def test_as_a_program():
    run = [sys.executable, "-m", "mpiring"]
    done = subprocess.run([*run, "verify", "ring"], capture_output=True, text=True)
    assert done.returncode == 0 and "ring" in done.stdout and done.stderr == ""
    done = subprocess.run([*run, "simulate", "--machine", "dgx3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == ""
    code = "import sys; sys.argv[1:] = ['verify']; from mpiring.__main__ import main; main(); print('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()[-1] == "False"


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "mpiring", "simulate", "--list"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


def test_the_readme_has_the_table_of_algorithms():
    from mpiring.commands.algorithms import legend, markdown

    chosen = list(ALGORITHMS.values())
    readme = (Path(mpiring.__file__).parent.parent / "README.md").read_text()
    assert markdown(chosen) in readme, "python -m mpiring algorithms --markdown"
    assert legend(chosen, True) in readme


def test_algorithms(capsys):
    assert main(["algorithms", "--collective", "broadcast"]) == 0
    out = capsys.readouterr().out
    assert "scatter_allgather" in out and "log + n - 1" in out and "log2 n, rounded up" in out and "rings" not in out
    assert main(["algorithms", "--json"]) == 0
    assert {entry["algorithm"] for entry in json.loads(capsys.readouterr().out)} == {name for _, name in ALGORITHMS}


OWN = str(Path(mpiring.__file__).parent.parent / "examples" / "own_algorithm.py")


def test_an_algorithm_of_ones_own(capsys):
    assert "star" in ran(capsys, f"verify {OWN}:star --ranks 2-5")
    assert "star" in ran(capsys, f"simulate --machine ethernet-1g --ranks 4 --bytes 1M --algorithms ring,{OWN}:star")
    assert "c0 +>0" in ran(capsys, f"draw {OWN}:star --ranks 4")
    assert "has no mpiring.Algorithm moon" in ran(capsys, f"verify {OWN}:moon", status=2)
    assert "no.py: FileNotFoundError" in ran(capsys, "verify no.py:moon", status=2)


def test_a_machine_written_by_hand_from_the_help(capsys, tmp_path):
    help_text = ran(capsys, "simulate --help")
    text = help_text[help_text.index('{"name": "mine"'):help_text.index("]}") + 2]
    (tmp_path / "mine.json").write_text(text)
    assert "rabenseifner" in ran(capsys, f"simulate --machine {tmp_path}/mine.json --bytes 1M")
    (tmp_path / "empty.json").write_text("{}")
    assert "key 'name', 'levels', 'ranks' is missing" in ran(capsys, f"simulate --machine {tmp_path}/empty.json --bytes 1M", 2)
    (tmp_path / "five.json").write_text(text.replace('"mine"', "5"))
    assert "key 'name' is 5, not text" in ran(capsys, f"simulate --machine {tmp_path}/five.json --bytes 1M", 2)


def test_several_sizes(capsys):
    out = ran(capsys, "simulate --machine ethernet-10g --ranks 16 --bytes 8,64K,64M")
    assert re.search(r"8 B +(recursive_doubling|bruck) ", out) and re.search(r"64 MiB +\w+ +10\d ms ", out)
    found = json.loads(ran(capsys, "simulate --machine ethernet-10g --bytes 8,64K --json"))
    assert [entry["bytes"] for entry in found] == [8, 65536]


def test_machines_as_json(capsys, tmp_path):
    assert {entry["name"] for entry in json.loads(ran(capsys, "simulate --list --json"))} == set(MACHINES)
    ran(capsys, f"simulate --machine p3.16xlarge --export {tmp_path}/p3.json")
    assert find_machine(f"{tmp_path}/p3.json") == MACHINES["p3.16xlarge"]


@pytest.mark.parametrize("line, words", [
    ("simulate --machine dgx2 --bytes 99999999999999G", "is too large"),
    ("simulate --machine dgx2 --bytes 1M --dtype float33", "did you mean"),
    ("verify ring --ranks 99999999999", "is too large"),
    ("simulate --machine p3.16xlarge --per-node 4 --bytes 1M", "joined by wires"),
    ("bench", "mpirun -np 8 python -m mpiring.bench"),
    ("draw ring --ranks 1000 --out big.svg", "a picture of 1,998,000 steps cannot be read"),
    ("draw --picture ranks --machine dgx2 --bytes 1M --ranks 1 --out a.svg", "nothing to compare below 2"),
])
def test_what_cannot_be(line, words, capsys):
    assert words in ran(capsys, line, status=2)


def test_other_ranks_stay_silent_behind_an_mpirun(capsys, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert ran(capsys, "algorithms") == ""


def test_a_full_disk_is_said_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mpiring", "algorithms"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the output: No space left on device\n")
