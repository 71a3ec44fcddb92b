"""Several hosts on one machine: network namespaces on a bridge, their links shaped to a rate, and Open MPI's mpirun over them.

Run a Python program on such hosts, as root:

    python tests/cluster/hosts.py --hosts 4 --rate 1gbit -- -m mpiring.bench -b 64M -e 64M -n 5

Bandwidth is shaped, latency is not. Messages under 256 KiB see no limit (the shaper's burst), and all hosts share the machine's
cores: read off what large messages take, and bytes. A link of 1 Gbit/s carries 0.949 Gbit/s of TCP payload.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "launch"))

from launch import environment, finish

AGENT = Path(__file__).resolve().parent / "agent"
BURST = "256kb"             # with 32 kB links of 1 Gbit/s ran at a third of their rate
TOOLS = ("ip", "tc", "unshare", "hostname")
DEALS = {"blocks": "slot", "turn": "node"}     # to Open MPI's --rank-by
NAMES = Path("/etc/netns")  # `ip netns exec NAME` shows the files of the folder NAME in here in place of those in /etc


@dataclass(frozen=True)
class Hosts:
    """Hosts that are up: their names, and a file of them for mpirun."""

    names: list[str]
    file: str

    def run(self, per_host: int, ranks: int, argv: list[str], timeout: float = 60,
            deal: str = "blocks") -> subprocess.CompletedProcess[str]:
        """Run a Python program with these arguments, so many ranks on each host, dealt to the hosts in blocks or in turn."""
        return finish(self.command(per_host, ranks, argv, deal), timeout)

    def command(self, per_host: int, ranks: int, argv: list[str], deal: str = "blocks") -> list[str]:
        """Return the command that does so."""
        mpirun = ["mpirun", "--prtemca", "plm_ssh_agent", str(AGENT), "--prtemca", "prte_if_include", "eth0",
                  "--hostfile", self.file, "--map-by", f"ppr:{per_host}:node", "--rank-by", DEALS[deal], "-np", str(ranks),
                  "--mca", "pml", "ob1", "--mca", "btl", "tcp,self,sm", "--mca", "btl_tcp_if_include", "eth0"]
        return [str(AGENT), self.names[0], "exec " + shlex.join([*mpirun, sys.executable, *argv])]

    def processes(self) -> list[list[int]]:
        """Return what runs on each host."""
        return [_processes(name) for name in self.names]


@contextmanager
def made(count: int, rate: str = "1gbit") -> Iterator[Hosts]:
    """Make hosts, each with a link of `rate` (as tc writes it; "none": not shaped); whatever happens, nothing stays behind."""
    token = f"mpiring{secrets.token_hex(3)}"
    names = [f"{token}h{index}" for index in range(count)]
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        switch = f"{token}switch"       # the bridge lives in a namespace of its own: this machine's network is not touched
        _namespace(switch, undo)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            _namespace(name, undo)
            _know(name, names, undo)
            _plug(name, _address(index), switch, f"port{index}", rate)
        file = folder / "hosts"
        file.write_text("".join(f"{name} slots=64\n" for name in names))
        yield Hosts(names, str(file))


def missing() -> str:
    """Return why no hosts can be made here, or nothing."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)} here (iproute2, util-linux, hostname)"
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        return "no mpirun here"
    if "Open MPI" not in finish(["mpirun", "--version"], 20).stdout:
        return "mpirun is not Open MPI's"
    name = f"mpiring{secrets.token_hex(3)}probe"
    try:
        with ExitStack() as undo:
            _namespace(name, undo)
            _do("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
            _shape(name, "bridge", "1gbit")
            _do(str(AGENT), name, "true")
    except RuntimeError as error:
        return f"no network namespaces with shaped links here: {error}"
    return ""


def namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines()]


def _namespace(name: str, undo: ExitStack) -> None:
    _do("ip", "netns", "add", name)
    undo.callback(_remove, name)


def _remove(name: str) -> None:
    """Remove a namespace, with whatever still runs in it."""
    for pid in _processes(name):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _do("ip", "netns", "delete", name)


def _processes(name: str) -> list[int]:
    return [int(pid) for pid in _do("ip", "netns", "pids", name).split()]


def _know(name: str, names: list[str], undo: ExitStack) -> None:
    """Give a host a hosts file of its own."""
    undo.callback(_forget, name)
    (NAMES / name).mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{_address(index)} {other}" for index, other in enumerate(names))]
    (NAMES / name / "hosts").write_text("\n".join(lines) + "\n")


def _forget(name: str) -> None:
    shutil.rmtree(NAMES / name, ignore_errors=True)
    with suppress(OSError):     # others may have files there
        NAMES.rmdir()


def _plug(name: str, address: str, switch: str, port: str, rate: str) -> None:
    """Connect a host with the switch by a link that is shaped both ways."""
    _do("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    _do("ip", "-n", name, "link", "set", "eth0", "up")
    _do("ip", "-n", name, "link", "set", "lo", "up")
    for place, device in ((name, "eth0"), (switch, port)) if rate != "none" else ():
        _shape(place, device, rate)


def _shape(place: str, device: str, rate: str) -> None:
    _do("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", "50ms")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _do(*command: str) -> str:
    """Run a command to its end and return its output; its complaint is the error."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def main() -> int:
    """Run a program over hosts that are made for it."""
    parser = argparse.ArgumentParser(description="Run a Python program on several hosts, as root.",
                                     epilog="Write -- before PROGRAM.")
    parser.add_argument("--hosts", type=int, default=4, help="hosts (default 4)")
    parser.add_argument("--rate", default="1gbit", help="rate of every link as tc writes it, or none (default 1gbit)")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host (default 1)")
    parser.add_argument("--deal", choices=DEALS, default="blocks", help="how ranks go to hosts: in blocks (default), or in turn")
    parser.add_argument("program", nargs="+", metavar="PROGRAM", help="program and its arguments, or -m MODULE and its arguments")
    chosen = parser.parse_args()
    if problem := missing():
        print(f"hosts.py: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that a `timeout` leaves nothing behind either
    with made(chosen.hosts, chosen.rate) as hosts:
        command = hosts.command(chosen.per_host, chosen.hosts * chosen.per_host, chosen.program, chosen.deal)
        return subprocess.run(command, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
