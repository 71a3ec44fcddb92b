"""A fit finds the figures behind made-up times again, foretells those left out, and says what is wrong with a file."""

import json
import random
from dataclasses import replace

import pytest

from mpiring.algorithms.registry import ALGORITHMS
from mpiring.analysis.cost import setting_for, simulate
from mpiring.analysis.fit import fit, read_bench, shape_of
from mpiring.analysis.machines import Level, Machine

NAMES = ("ring", "recursive_doubling", "rabenseifner", "tree")
SIZES = [16, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22]
NODE = Machine("truth", (Level("node", None, 3e-6, 4e-10),), {"default": 2e-10}, 8)
HOSTS = Machine("truth", (Level("node", 2, 1e-6, 1e-10), Level("network", None, 4e-5, 9e-9, ranks_per_port=2)),
                {"default": 2e-10}, 8)
PLACE = {"ranks": 8, "nodes": 1, "ranks_per_node": 8}


def result(algorithm, nbytes, seconds, collective="allreduce"):
    return {"collective": collective, "algorithm": algorithm, "bytes": nbytes, "count": nbytes // 4, "dtype": "float32",
            "op": "sum", "time_us": {"median": seconds * 1e6, "min": seconds * 1e6, "p99": seconds * 2e6}, "algbw": 1.0,
            "busbw": 1.0, "native_ratio": None, "wrong": 0}


def write(path, results, **environment):
    path.write_text(json.dumps({"environment": {**PLACE, **environment}, "results": results}))
    return path


def measured(truth, noise=0.03, names=NAMES, sizes=SIZES):
    """Return a bench's results on a machine, with noise from a fixed seed."""
    chance = random.Random(1)
    found = []
    for name in names:
        for nbytes in sizes:
            setting = setting_for(ALGORITHMS["allreduce", name], nbytes, truth, truth.ranks)
            seconds = simulate(name, nbytes, truth, setting=setting).seconds
            found.append(result(name, nbytes, seconds * (1 + chance.gauss(0, noise))))
    return found


def close(found, wanted, factor):
    assert wanted / factor < found < wanted * factor, (found, wanted)


def test_one_node_is_found_again(tmp_path):
    bench = read_bench(write(tmp_path / "bench.json", [*measured(NODE), result("native", 4, 1e-6), result("mine.py:fn", 4, 1e-6)]))
    assert len(bench.points) == len(NAMES) * len(SIZES)
    found = fit(bench.points, shape_of(bench))
    level = found.machine.levels[0]
    close(level.alpha, 3e-6, 1.05)
    close(level.beta, 4e-10, 1.1)
    close(found.machine.gamma["default"], 2e-10, 1.2)
    assert found.median_error < 0.03 and found.worst_error < 0.12
    assert sum(point.held_out for point in found.points) == len(NAMES) * (len(SIZES) // 2)


def test_nodes_and_a_network_are_found_again(tmp_path):
    times = measured(HOSTS, names=("ring", "recursive_doubling", "hierarchical"), sizes=SIZES[::2] + SIZES[3::2])
    bench = read_bench(write(tmp_path / "bench.json", times, nodes=4, ranks_per_node=2))
    found = fit(bench.points, shape_of(bench))
    node, network = found.machine.levels
    close(network.alpha, 4e-5, 1.1)
    close(network.beta, 9e-9, 1.1)
    assert network.ranks_per_port == 2 and node.group == 2
    assert found.median_error < 0.04 and found.worst_error < 0.15


@pytest.mark.parametrize("alpha, beta, gamma", [(1e-3, 1e-12, 1e-7), (1e-9, 1e-6, 1e-13)])
def test_a_bad_start_does_no_harm(tmp_path, alpha, beta, gamma):
    bench = read_bench(write(tmp_path / "bench.json", measured(NODE, names=("ring", "tree"))))
    start = Machine("start", (Level("node", None, alpha, beta),), {"default": gamma}, 8)
    found = fit(bench.points, start)
    close(found.machine.levels[0].alpha, 3e-6, 1.1)
    assert found.median_error < 0.04


def test_gamma_that_no_time_depends_on_stays_near_the_start(tmp_path):
    times = [simulate("ring", nbytes, NODE, collective="allgather").seconds for nbytes in SIZES]
    points = [result("ring", nbytes, seconds, "allgather") for nbytes, seconds in zip(SIZES, times)]
    bench = read_bench(write(tmp_path / "bench.json", points))
    found = fit(bench.points, shape_of(bench))
    close(found.machine.gamma["default"], shape_of(bench).gamma["default"], 1.5)
    assert found.worst_error < 0.01
    assert fit(bench.points, replace(shape_of(bench), gamma={"default": 0.0})).machine.gamma == {"default": 0.0}


def test_hold_out_by_name_and_size_and_the_ranking(tmp_path):
    bench = read_bench(write(tmp_path / "bench.json", measured(NODE, noise=0, names=("ring", "tree", "bruck"), sizes=SIZES[1:5])))
    found = fit(bench.points, shape_of(bench), hold_out=["bruck", SIZES[1]])
    assert {entry.point.algorithm for entry in found.points if not entry.held_out} == {"ring", "tree"}
    assert all(entry.held_out == (entry.point.algorithm == "bruck" or entry.point.nbytes == SIZES[1]) for entry in found.points)
    assert found.worst_error < 0.02
    for order, predicted in found.ranking.values():
        assert order == predicted and sorted(order) == ["bruck", "ring", "tree"]
    with pytest.raises(ValueError, match="hold_out: no point has the algorithm or the size 'rign', 5"):
        fit(bench.points, shape_of(bench), hold_out=["rign", 5])
    with pytest.raises(ValueError, match="no point is left to fit"):
        fit(bench.points, shape_of(bench), hold_out=["ring", "tree", "bruck"])


def test_hosts_with_one_rank_each(tmp_path):
    bench = read_bench(write(tmp_path / "bench.json", [result("ring", nbytes, 1e-4 + nbytes * 1e-8) for nbytes in SIZES], nodes=8,
                             ranks_per_node=1))
    assert [level.group for level in shape_of(bench).levels] == [1, None]
    assert fit(bench.points, shape_of(bench)).worst_error < 0.3


@pytest.mark.parametrize("text, match", [
    ("{", "not JSON"), ("[]", "not a bench's JSON"), ("{}", "key 'environment' is missing"),
    ('{"environment": {"ranks": 2, "nodes": 1}, "results": []}', "key 'ranks_per_node' is missing"),
    (json.dumps({"environment": {**PLACE, "nodes": "x"}, "results": []}), "'x' where a number"),
    (json.dumps({"environment": PLACE, "results": []}), "no results"),
    (json.dumps({"environment": PLACE, "results": [{"collective": "allreduce"}]}), "key 'time_us' is missing"),
    (json.dumps({"environment": PLACE, "results": [result("native", 4, 1e-6)]}), "only of native"),
    (json.dumps({"environment": PLACE, "results": [result("ring", 4, 0.0)]}), "a median of 0"),
])
def test_files_that_are_no_bench(tmp_path, text, match):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        read_bench(path)
    assert "bench.json" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_bench(tmp_path / "none.json")
