"""Machines are data: every figure has its source, what cannot be is refused, and JSON brings back what it was given."""

import json
from dataclasses import replace

import pytest

from mpiring.algorithms.setting import Ring
from mpiring.analysis.machines import (
    CUBE_MESH,
    CUBE_RINGS,
    MACHINES,
    Level,
    Machine,
    ethernet,
    find_machine,
    from_json,
    to_json,
    with_ranks_per_node,
)

NAN, INF = float("nan"), float("inf")


def level(**changes):
    return Level(**{"name": "flat", "group": None, "alpha": 1e-6, "beta": 1e-9, **changes})


def machine(*levels, **changes):
    return Machine(**{"name": "mine", "levels": levels or (level(),), "gamma": {"default": 0.0}, "ranks": 8, **changes})


@pytest.mark.parametrize("name", MACHINES)
def test_every_figure_has_a_source(name):
    found = MACHINES[name]
    assert found.name == name and found.about
    for entry in found.levels:
        figures = {"alpha", "beta", "links", "ranks_per_port"}
        figures |= {key for key in ("wires", "bus") if getattr(entry, key) is not None}
        for figure in figures:
            assert len(entry.sources[figure]) > 5, (entry.name, figure)
        assert set(entry.sources) == figures
    assert found.sources["gamma"] and (not found.rings or found.sources["rings"])


@pytest.mark.parametrize("name", MACHINES)
def test_json_brings_back_every_machine(name, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(to_json(MACHINES[name]))
    assert find_machine(str(path)) == MACHINES[name]


@pytest.mark.parametrize("name", MACHINES)
def test_all_ranks_of_a_machine_are_joined(name):
    found = MACHINES[name]
    found.check(found.ranks)
    for rank in range(1, found.ranks):
        assert found.path(0, rank) in found.levels


def test_the_cube_mesh():
    links = [sum(count for ends, count in CUBE_MESH.items() if gpu in ends) for gpu in range(8)]
    assert links == [6] * 8
    used = {}
    for order, weight in CUBE_RINGS:
        for a, b in zip(order, order[1:] + order[:1]):
            used[min(a, b), max(a, b)] = used.get((min(a, b), max(a, b)), 0) + weight
    assert used == CUBE_MESH                             # each link in one ring, each way
    p3 = find_machine("p3.16xlarge")
    assert [p3.path(0, other).name for other in (1, 5, 8)] == ["nvlink", "pcie", "network"]
    assert p3.textbook(160_000_000) == pytest.approx(2 * 160e6 / (3 * 18e9))
    assert p3.rings_for(8) == CUBE_RINGS and p3.rings_for(16) == ()


def test_nodes_and_latency():
    pod = find_machine("dgx-h100")
    assert pod.ranks_per_node == 8 and pod.nodes(10) == (0,) * 8 + (1, 1)
    assert find_machine("cpu-node").nodes(4) == (0,) * 4
    assert find_machine("ethernet-10g").nodes(3) == (0, 1, 2)
    assert [pod.spanning(ranks).name for ranks in (8, 9)] == ["nvlink", "network"]
    assert pod.latency_bytes(8) == pytest.approx(3.4e-6 * 18 * 25e9)


def test_more_ranks_on_a_node_share_its_nic():
    hosts = with_ranks_per_node(find_machine("ethernet-10g"), 4)
    assert hosts.levels == ethernet(10, 15e-6, 4).levels and hosts.ranks == 32
    pod = with_ranks_per_node(find_machine("dgx-h100"), 4)
    assert (pod.levels[0].group, pod.levels[1].ranks_per_port, pod.ranks) == (4, 1, 16)
    with pytest.raises(ValueError, match="joined by wires, so there cannot be 4 on a node"):
        with_ranks_per_node(find_machine("p3.16xlarge"), 4)


@pytest.mark.parametrize("changes, match", [
    ({"beta": 0}, "level 'flat': beta is 0, not a time in seconds above 0"), ({"beta": -1e-9}, "beta is -1e-09"),
    ({"beta": INF}, "beta is inf"), ({"beta": NAN}, "beta is nan"), ({"beta": "fast"}, "beta is 'fast'"),
    ({"alpha": -1}, "alpha is -1"), ({"alpha": NAN}, "alpha is nan"), ({"alpha": INF}, "alpha is inf"),
    ({"bus": 0}, "bus is 0"), ({"group": 0}, "group is 0"), ({"group": 2.5}, "group is 2.5"), ({"links": 0}, "links is 0"),
    ({"ranks_per_port": -1}, "ranks_per_port is -1"), ({"duplex": "both"}, "duplex is 'both', not 'full' or 'half'"),
    ({"group": 8, "ranks_per_port": 3}, "ports of 3 ranks do not divide a group of 8"),
    ({"wires": {(0, 1): 1}}, "wires need a group"), ({"group": 4, "wires": {(0, 4): 1}}, "joins places 0 and 4"),
    ({"group": 4, "wires": {(1, 1): 1}}, "joins places 1 and 1"), ({"group": 4, "wires": {(0, 1): 0}}, "wire 0-1: links is 0"),
    ({"group": 4, "wires": {(0, 1): 1, (1, 0): 1}}, "between places 0 and 1 is there twice"),
    ({"group": 4, "ranks_per_port": 2, "wires": {(0, 1): 1}}, "no shared ports"),
])
def test_levels_that_cannot_be(changes, match):
    with pytest.raises(ValueError, match=match):
        level(**changes)


@pytest.mark.parametrize("changes, match", [
    ({"levels": ()}, "machine mine: it has no level"), ({"gamma": {}}, "gamma has no 'default'"),
    ({"gamma": {"default": NAN}}, "gamma of default is nan"), ({"gamma": {"default": 0, "float16": -1}}, "gamma of float16 is -1"),
    ({"ranks": 0}, "ranks is 0"),
    ({"levels": (level(group=3), level(group=4))}, r"of level 'flat' \(4\) are not made of whole groups of level 'flat' \(3\)"),
    ({"levels": (level(), level())}, r"whole groups of level 'flat' \(all\)"),
])
def test_machines_that_cannot_be(changes, match):
    with pytest.raises(ValueError, match=match):
        machine(**changes)


def test_ranks_that_nothing_joins():
    with pytest.raises(ValueError, match="machine mine: no path between rank 0 and rank 8: its outermost level joins 8 ranks"):
        machine(level(group=8)).check(9)
    machine(level(group=8)).check(8)
    wired = machine(level(group=4, wires={(0, 1): 1, (1, 2): 1}))
    wired.check(2)
    with pytest.raises(ValueError, match="between rank 0 and rank 2: its outermost level joins only places with a wire"):
        wired.check(3)


GOOD = json.loads(to_json(machine(level(group=4, wires={(0, 1): 1}), level(), rings=(Ring((1, 0), 2),))))


@pytest.mark.parametrize("change, match", [
    (lambda data: data.pop("ranks"), "mine.json: key 'ranks' is missing"),
    (lambda data: data.update(gama=1), "mine.json: unknown key 'gama' .did you mean 'gamma'"),
    (lambda data: data["levels"][1].pop("beta"), r"mine.json: levels\[1\]: key 'beta' is missing"),
    (lambda data: data["levels"][0].update(speed=1), r"mine.json: levels\[0\]: unknown key 'speed'"),
    (lambda data: data["levels"][0].update(alpha=-1), r"mine.json: levels\[0\]: level 'flat': alpha is -1"),
    (lambda data: data["levels"][0].update(wires={"0": 1}), "key 'wires' is not an object"),
    (lambda data: data["levels"][0].update(wires=[1]), "key 'wires' is not an object"),
    (lambda data: data.update(levels=3), "key 'levels' is not a list"),
    (lambda data: data.update(levels=[3]), r"levels\[0\]: not an object"),
    (lambda data: data.update(rings=[{"order": 1}]), r"rings\[0\]: not an object with the keys 'order' and 'weight'"),
    (lambda data: data.update(gamma=[1]), r"gamma of default is \[1\], not a time in seconds"),
    (lambda data: data.update(name=5), "key 'name' is 5, not text"),
    (lambda data: data.update(sources=[1]), r"key 'sources' is \[1\], not an object"),
    (lambda data: data.update(ranks="8"), "mine.json: machine mine: ranks is '8'"),
])
def test_bad_json_is_named_with_its_key(change, match):
    data = json.loads(json.dumps(GOOD))
    assert from_json(json.dumps(data)).rings == (Ring((1, 0), 2),)
    change(data)
    with pytest.raises(ValueError, match=match):
        from_json(json.dumps(data), "mine.json")


def test_finding_machines(tmp_path):
    with pytest.raises(ValueError, match=r"unknown machine 'dgx-h10'.*did you mean 'dgx-h100'.*known: p3.16xlarge, dgx2"):
        find_machine("dgx-h10")
    with pytest.raises(ValueError, match=r"none\.json: cannot be read: No such file"):
        find_machine(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: not JSON"):
        find_machine(str(tmp_path / "bad.json"))
    with pytest.raises(ValueError, match="not an object"):
        from_json("[]")
    assert replace(find_machine("pcie"), name="other").name == "other"
