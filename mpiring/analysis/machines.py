"""Machines as data: levels of links between ranks, each with its alpha and beta, and what a rank takes to reduce.

A level joins the ranks of a group; ranks that it does not join reach each other at the next level out. A pod of two nodes with
three ranks each, where each node has one NIC:

    node       0 - 1 - 2   3 - 4 - 5     Level("node", group=3, ...): a port for each rank
    network        |           |         Level("network", group=None, ranks_per_port=3, ...): one port for three ranks

Every figure of a ready-made machine has its source beside it. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from mpiring.algorithms.registry import unknown
from mpiring.algorithms.setting import Ring

Wires = Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class Level:
    """What joins the ranks of a group.

    group: how many consecutive ranks reach each other at this level; None: all.
    alpha: s for each message. beta: s for each byte over one link.
    links: links of a port; a message is spread over them, so it moves at links / beta.
    ranks_per_port: consecutive ranks that share a port: 1 where each has its own, 8 where the NIC is the node's.
    duplex: "full", a port sends and receives over different links, or "half", over the same ones.
    wires: {(a, b): links} between places in a group, instead of ports; places without a wire do not reach each other here.
        A wire joins both ways; with full duplex each way has links of its own.
    bus: s for each byte of what all messages of a group go through, such as memory or a host bridge; None: there is no such thing.
    pair: s for each byte that two ports send each other, both ways together, such as over a TCP connection, where acknowledgements
        wait behind data; None: what goes one way does not slow down what goes the other.
    sources: where the figures come from, by the names above.

    Raises ValueError for a figure that no machine can have.
    """

    name: str
    group: int | None
    alpha: float
    beta: float
    links: int = 1
    ranks_per_port: int = 1
    duplex: str = "full"
    wires: Wires | None = None
    bus: float | None = None
    pair: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        for name in ("group", "links", "ranks_per_port"):
            _check_whole(where, name, getattr(self, name), name == "group")
        _check_time(where, "alpha", self.alpha, least=0)
        _check_time(where, "beta", self.beta)
        for name in ("bus", "pair"):
            if getattr(self, name) is not None:
                _check_time(where, name, getattr(self, name))
        if self.pair is not None and self.wires is not None:
            raise ValueError(f"{where}: pair is for ports, not for wires")
        if self.duplex not in ("full", "half"):
            raise ValueError(f"{where}: duplex is {self.duplex!r}, not 'full' or 'half'")
        if self.group is not None and self.group % self.ranks_per_port:
            raise ValueError(f"{where}: ports of {self.ranks_per_port} ranks do not divide a group of {self.group}")
        self._check_wires(where)

    def _check_wires(self, where: str) -> None:
        if self.wires is None:
            return
        if self.group is None or self.ranks_per_port != 1:
            raise ValueError(f"{where}: wires need a group of a known number of ranks, and no shared ports")
        for (a, b), links in self.wires.items():
            if not (0 <= a < self.group and 0 <= b < self.group and a != b):
                raise ValueError(f"{where}: a wire joins places {a} and {b}, not two of a group of {self.group}")
            if (b, a) in self.wires:
                raise ValueError(f"{where}: the wire between places {min(a, b)} and {max(a, b)} is there twice")
            _check_whole(f"{where}: wire {a}-{b}", "links", links)

    def joins(self, a: int, b: int) -> bool:
        """Tell whether two ranks reach each other at this level."""
        if self.group is None:
            return True
        if a // self.group != b // self.group:
            return False
        pair = a % self.group, b % self.group
        return self.wires is None or pair in self.wires or pair[::-1] in self.wires


def _check_whole(where: str, name: str, value: object, optional: bool = False) -> None:
    if not (optional and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{where}: {name} is {value!r}, not a number from 1 on")


def _check_time(where: str, name: str, value: Any, least: float | None = None) -> None:
    """Refuse what is no time: a bandwidth of zero is an infinite beta, an infinite one a beta of zero."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not good or value < 0 or (least is None and value == 0):
        raise ValueError(f"{where}: {name} is {value!r}, not a time in seconds{'' if least == 0 else ' above 0'}")


@dataclass(frozen=True)
class Machine:
    """Levels from the innermost to the outermost, and the s per byte that a rank takes to reduce.

    gamma: by name of dtype; "default" for those that are not named.
    ranks: how many ranks there are, where nobody says.
    rings: for multi_ring, where they go through as many ranks as there are.
    about, sources: what the machine is, and where gamma and rings come from.

    Raises ValueError for a machine that cannot be.
    """

    name: str
    levels: tuple[Level, ...]
    gamma: Mapping[str, float]
    ranks: int
    rings: tuple[Ring, ...] = ()
    about: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"machine {self.name}"
        _check_whole(where, "ranks", self.ranks)
        if not self.levels:
            raise ValueError(f"{where}: it has no level")
        if "default" not in self.gamma:
            raise ValueError(f"{where}: gamma has no 'default'")
        for name, gamma in self.gamma.items():
            _check_time(where, f"gamma of {name}", gamma, least=0)
        for inner, outer in zip(self.levels, self.levels[1:]):
            if inner.group is None or (outer.group is not None and outer.group % inner.group):
                raise ValueError(f"{where}: groups of level {outer.name!r} ({outer.group or 'all'}) are not made of whole groups "
                                 f"of level {inner.name!r} ({inner.group or 'all'})")

    @property
    def ranks_per_node(self) -> int:
        """How many ranks the innermost level joins."""
        return self.levels[0].group or self.ranks

    def nodes(self, ranks: int) -> tuple[int, ...]:
        """Return the number of each rank's node, as Setting wants it."""
        group = self.levels[0].group
        return tuple(rank // group if group else 0 for rank in range(ranks))

    def path(self, a: int, b: int) -> Level:
        """Return the innermost level that joins two ranks; ValueError where none does."""
        for level in self.levels:
            if level.joins(a, b):
                return level
        last = self.levels[-1]
        wired = last.wires is not None and a // last.group == b // last.group
        raise ValueError(f"machine {self.name}: no path between rank {a} and rank {b}: its outermost level joins "
                         f"{'only places with a wire' if wired else f'{last.group} ranks'}")

    def check(self, ranks: int) -> None:
        """Raise ValueError unless so many ranks can all reach each other."""
        last = self.levels[-1]
        if last.wires is None and ranks > (last.group or inf):
            self.path(0, last.group or 0)
        if last.wires is not None:
            for a in range(min(ranks, (last.group or 0) + 1)):
                for b in range(a):
                    self.path(b, a)

    def spanning(self, ranks: int) -> Level:
        """Return the innermost level whose groups hold so many ranks."""
        return next((level for level in self.levels if (level.group or inf) >= ranks), self.levels[-1])

    def latency_bytes(self, ranks: int) -> float:
        """Return how many bytes a port moves in the time of a message's alpha, at the level that holds so many ranks."""
        level = self.spanning(ranks)
        return level.alpha * level.links / level.beta

    def rings_for(self, ranks: int) -> tuple[Ring, ...]:
        """Return the rings, where they go through so many ranks."""
        return self.rings if all(len(ring.order) == ranks for ring in self.rings) else ()

    def textbook(self, nbytes: int) -> float:
        """Return the textbook's seconds for an allreduce of `nbytes`: 2 nbytes over all links that a rank's rings use one way.

        It leaves out alpha, gamma and the factor (n-1)/n.
        """
        level = self.spanning(self.ranks)
        links = sum(ring.weight for ring in self.rings) or level.links
        return 2 * nbytes * level.beta / links


def with_ranks_per_node(machine: Machine, count: int) -> Machine:
    """Return the machine with `count` ranks on each node; ports that a node's ranks share are shared by all of them."""
    before = machine.levels[0].group
    if machine.levels[0].wires is not None and count != before:
        raise ValueError(f"machine {machine.name}: its {before} ranks are joined by wires, so there cannot be {count} on a node")
    inner = replace(machine.levels[0], group=count)
    if len(machine.levels) == 1:
        return replace(machine, levels=(inner,), ranks=count)
    outer = (_regrouped(level, before, count) for level in machine.levels[1:])
    nodes = max(1, machine.ranks // machine.ranks_per_node)
    return replace(machine, levels=(inner, *outer), ranks=nodes * count)


def _regrouped(level: Level, before: int | None, count: int) -> Level:
    group = level.group and before and level.group // before * count
    return replace(level, group=group, ranks_per_port=count if level.ranks_per_port == before else level.ranks_per_port)


HOTCHIPS = "NVIDIA, NVSwitch Accelerates NVIDIA DGX-2, developer blog (2018): 6 NVLinks a GPU, all to the switches"
TUNING = "NCCL 2.8 src/graph/tuning.cc, hwLat, ring, Simple protocol: {} us a step over {}"
TOPO = "NCCL 2.2x src/graph/topo.h, {} = {} GB/s: what it counts on, below the data sheet's figure"
OVERLAPPED = ("taken as 0: NCCL's kernels reduce while they receive (src/device/all_reduce.h, recvReduceSend), and GPU memory is "
              "several times faster than the links")
OWN_PORT = "each rank has a port of its own"
MPI_SMALL = "NetPIPE-style ping-pong of small messages by MPI over kernel TCP, order of magnitude: {} us one way"
ETHERNET = "IEEE 802.3 line rate of {} Gbit/s less the headers of frames of 1,500 bytes: {} of {} bytes are TCP payload"
HOST = "NumPy adds float32 in cache at about 13 GB/s a core, float16 at 0.5; order of magnitude, fit yours"
COPY = "one core's copy through shared memory moves about {} GB/s, order of magnitude, fit yours"

CPU_GAMMA = {"default": 1 / 13e9, "float64": 1 / 13e9, "float16": 1 / 0.5e9}
TCP_SHARE = 1448 / 1538
"""Payload of a full Ethernet frame with TCP timestamps, of the bytes that its time on the wire is worth."""

CUBE_MESH = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
             (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}
CUBE_RINGS = (Ring((0, 3, 2, 1, 5, 6, 7, 4), 2), Ring((0, 1, 3, 7, 5, 4, 6, 2), 1))


def _network(gigabits: float, alpha: float, payload: float, sources: dict[str, str], shared: int = 1) -> Level:
    return Level("network", None, alpha, 8 / (gigabits * 1e9 * payload), ranks_per_port=shared, sources=sources)


def ethernet(gigabits: float, alpha: float, ranks_per_host: int = 1) -> Machine:
    """Return hosts behind a switch, each with one NIC of so many Gbit/s that its ranks share; alpha: s for a message by TCP."""
    host = Level("host", ranks_per_host, 1e-6, 1 / 5e9, sources={
        "alpha": "small MPI messages through shared memory take about 1 us", "beta": COPY.format(5), "links": "one core copies",
        "ranks_per_port": OWN_PORT})
    network = _network(gigabits, alpha, TCP_SHARE, {
        "alpha": MPI_SMALL.format(f"{alpha * 1e6:g}"), "beta": ETHERNET.format(f"{gigabits:g}", 1448, 1538),
        "links": "one NIC a host", "ranks_per_port": "the NIC is the host's"}, ranks_per_host)
    return Machine(f"ethernet-{gigabits:g}g", (host, network), CPU_GAMMA, 8 * ranks_per_host,
                   about=f"hosts with one {gigabits:g} Gbit/s NIC each behind one switch", sources={"gamma": HOST})


def _p3() -> Machine:
    nvlink = Level("nvlink", 8, 3.4e-6, 1 / 18e9, wires=CUBE_MESH, sources={
        "alpha": TUNING.format(3.4, "NVLink"),
        "beta": "18 GB/s a link and direction, as measured; the data sheet has 25, NCCL's src/graph/topo.h 18 for P100 and 20 to "
                "22 for V100",
        "links": "each wire has its own", "ranks_per_port": "wires, no ports",
        "wires": "NVIDIA DGX-1 With Tesla V100 System Architecture, white paper (2017): hybrid cube mesh, 6 links a GPU; Apache "
                 "MXNet's wiki on p3.16xlarge shows it with double, single and PCIe connections"})
    pcie = Level("pcie", 8, 5.7e-6, 1 / 10e9, sources={
        "alpha": TUNING.format(5.7, "PCIe"), "beta": "Apache MXNet's wiki on p3.16xlarge: PCI-E connection + CPU, 10 GB/s",
        "links": "one x16 slot", "ranks_per_port": OWN_PORT})
    network = _network(25, 30e-6, TCP_SHARE, {
        "alpha": MPI_SMALL.format(30) + "; EC2 promises none", "beta": "Amazon EC2 P3 instances: 25 Gbit/s a p3.16xlarge; "
        + ETHERNET.format(25, 1448, 1538), "links": "one NIC an instance", "ranks_per_port": "the NIC is the instance's"}, 8)
    return Machine("p3.16xlarge", (nvlink, pcie, network), {"default": 0.0}, 8, CUBE_RINGS,
                   "8 V100 in a hybrid cube mesh; several instances over 25 Gbit/s Ethernet",
                   {"gamma": OVERLAPPED, "rings": "the mesh taken apart: a ring of doubled links and one of single ones, each way"})


def _dgx2() -> Machine:
    nvlink = Level("nvswitch", 16, 3.4e-6, 1 / 20e9, 6, sources={
        "alpha": TUNING.format(3.4, "NVLink"), "beta": TOPO.format("SM70_NVLINK_BW", 20), "links": HOTCHIPS,
        "ranks_per_port": OWN_PORT})
    network = _network(100, 9.6e-6, 0.96, {
        "alpha": TUNING.format(9.6, "the network"), "beta": "NCCL src/graph/topo.h, NET_BW = 12 GB/s of 100 Gbit/s EDR InfiniBand",
        "links": "8 NICs for 16 GPUs: one for every two (NVIDIA DGX-2 data sheet)", "ranks_per_port": "the same"}, 2)
    return Machine("dgx2", (nvlink, network), {"default": 0.0}, 16, sources={"gamma": OVERLAPPED},
                   about="16 V100 behind NVSwitch; several over 100 Gbit/s InfiniBand")


def _dgx_h100() -> Machine:
    nvlink = Level("nvlink", 8, 3.4e-6, 1 / 25e9, 18, sources={
        "alpha": TUNING.format(3.4, "NVLink"),
        "beta": "NVIDIA H100 data sheet: 900 GB/s both ways over 18 links, 25 GB/s a link and direction. NCCL reaches about 370 of "
                "450 GB/s without NVLink SHARP (NVIDIA/nccl-tests issue 212)",
        "links": "NVIDIA H100 data sheet: 18 NVLinks, all to the switches", "ranks_per_port": OWN_PORT})
    network = _network(400, 9.6e-6, 0.97, {
        "alpha": TUNING.format(9.6, "the network"),
        "beta": "ConnectX-7 at 400 Gbit/s; about 3 % are headers of InfiniBand packets of 4 KiB and lost to gaps",
        "links": "NVIDIA DGX H100 User Guide: eight ConnectX-7 ports for the GPUs, one each", "ranks_per_port": "the same"})
    return Machine("dgx-h100", (nvlink, network), {"default": 0.0}, 32, sources={"gamma": OVERLAPPED},
                   about="a pod of DGX H100: 8 GPUs a node, one 400 Gbit/s NIC a GPU")


def _cpu_node() -> Machine:
    memory = Level("memory", None, 1e-6, 1 / 8e9, bus=1 / 40e9, sources={
        "alpha": "small MPI messages through shared memory take about 1 us", "beta": COPY.format(8), "links": "one core copies",
        "ranks_per_port": "each rank has a core of its own",
        "bus": "a message is written and read: half of about 80 GB/s, STREAM on a server socket with four to six channels of DDR4"})
    return Machine("cpu-node", (memory,), CPU_GAMMA, 8, sources={"gamma": HOST},
                   about="cores of one node, messages through shared memory")


def _pcie() -> Machine:
    sources = {"alpha": TUNING.format(5.7, "PCIe"), "beta": TOPO.format("PCI_BW", 12), "links": "one x16 slot of PCIe 3.0",
               "ranks_per_port": OWN_PORT}
    switch = Level("switch", 4, 5.7e-6, 1 / 12e9, sources=sources)
    bridge = Level("host bridge", 8, 5.7e-6, 1 / 12e9, bus=1 / 9e9, sources={
        **sources, "bus": "NCCL 2.8 src/graph/topo.h, SKL_QPI_WIDTH = 9 GB/s between two sockets"})
    return Machine("pcie", (switch, bridge), {"default": 0.0}, 8, sources={"gamma": OVERLAPPED},
                   about="8 GPUs behind two PCIe switches that a host bridge joins")


MACHINES = {machine.name: machine for machine in (
    _p3(), _dgx2(), _dgx_h100(), _cpu_node(), ethernet(1, 30e-6), ethernet(10, 15e-6), ethernet(100, 10e-6), _pcie())}


def find_machine(name: str) -> Machine:
    """Return a ready-made machine by name, or one from a .json file by path; ValueError names the nearest name and lists all."""
    if name.endswith(".json"):
        try:
            return from_json(Path(name).read_text(), name)
        except OSError as error:
            raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{name}: not JSON: it is no text") from None
    if name not in MACHINES:
        raise ValueError(unknown("machine", name, MACHINES, " (nor a path that ends in .json)"))
    return MACHINES[name]


def to_json(machine: Machine) -> str:
    """Write a machine as JSON text; wires as {"0-1": links}."""
    data = asdict(machine)
    for level in data["levels"]:
        if level["wires"] is not None:
            level["wires"] = {f"{a}-{b}": links for (a, b), links in level["wires"].items()}
    data["rings"] = [{"order": list(ring.order), "weight": ring.weight} for ring in machine.rings]
    return json.dumps(data, indent=1) + "\n"


def from_json(text: str, where: str = "machine") -> Machine:
    """Read a machine from to_json's text; ValueError names `where` and the key at fault."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    data = _keys(Machine, data, where)
    data["levels"] = tuple(_level(level, f"{where}: levels[{index}]") for index, level in enumerate(_list(data, "levels", where)))
    data["rings"] = tuple(_ring(ring, f"{where}: rings[{index}]") for index, ring in enumerate(_list(data, "rings", where)))
    data["gamma"] = data["gamma"] if isinstance(data["gamma"], dict) else {"default": data["gamma"]}
    try:
        return Machine(**data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _keys(kind: type, data: object, where: str) -> dict[str, Any]:
    """Return an object's keys as those of a dataclass, or say which one is missing or too many."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: not an object")
    names = [entry.name for entry in fields(kind)]
    needed = ("name", "levels", "ranks") if kind is Machine else ("name", "alpha", "beta")
    usual = {"gamma": 0.0} if kind is Machine else {"group": None}
    for key in data:
        if key not in names:
            raise ValueError(f"{where}: {unknown('key', key, names)}")
    if missing := [repr(key) for key in needed if key not in data]:
        raise ValueError(f"{where}: key {', '.join(missing)} is missing")
    for key, kinds in (("name", str), ("about", str), ("sources", dict)):
        if not isinstance(data.get(key, kinds()), kinds):
            raise ValueError(f"{where}: key {key!r} is {data[key]!r}, not {'text' if kinds is str else 'an object'}")
    return {**usual, **data}


def _list(data: dict[str, Any], key: str, where: str) -> list:
    value = data.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{where}: key {key!r} is not a list")
    return value


def _level(data: object, where: str) -> Level:
    data = _keys(Level, data, where)
    if data.get("wires") is not None:
        try:
            data["wires"] = {tuple(map(int, ends.split("-", 1))): links for ends, links in data["wires"].items()}
        except (AttributeError, ValueError):
            raise ValueError(f"{where}: key 'wires' is not an object such as {{\"0-1\": 2}}") from None
        if any(len(ends) != 2 for ends in data["wires"]):
            raise ValueError(f"{where}: key 'wires' is not an object such as {{\"0-1\": 2}}")
    try:
        return Level(**data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _ring(data: object, where: str) -> Ring:
    if not isinstance(data, dict) or set(data) - {"weight"} != {"order"} or not isinstance(data["order"], list):
        raise ValueError(f"{where}: not an object with the keys 'order' and 'weight'")
    return Ring(tuple(data["order"]), data.get("weight", 1))
