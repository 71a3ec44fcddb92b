"""Run a command: python -m mpiring --help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mpiring.algorithms.registry import unknown
from mpiring.errors import ScheduleError
from mpiring.version import __version__

COMMANDS = {
    "algorithms": "list all algorithms: steps, what the busiest rank sends, what each is for",
    "verify": "prove algorithms for given numbers of ranks, from their schedules alone",
    "simulate": "price a collective on a machine and rank the algorithms, or find the best bucket size for a model",
    "draw": "draw a schedule as text, or as a picture; also pictures of time, ranks and buckets",
    "fit": "find alpha, beta and gamma from a bench's JSON, and see how well they foretell",
    "select": "show which algorithm runs at which size, and the times predicted and measured",
    "timeline": "join the timelines of an engine's ranks; show where its time went, and which rank was waited for",
}
TUNE = "tune"
"""The command that runs under MPI, on all ranks."""

CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses as the shell has them: 128 and the signal's number."""


RANKS = "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"
"""Where launchers put a process's rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status: 0, 1 for a wrong schedule, 2 for wrong use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [TUNE]:
        return import_module("mpiring.bench.tune").main(arguments[1:])
    if next((os.environ[name] for name in RANKS if name in os.environ), "0") != "0":
        return 0                                         # behind an mpirun that is not needed, one process is enough
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except OSError as error:
        return _closed() if isinstance(error, BrokenPipeError) else _failed(error)
    except ScheduleError as error:
        return _say(f"wrong schedule: {error}", 1)
    except ValueError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:
        return INTERRUPTED


def _closed() -> int:
    """Go on quietly where nobody reads any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)         # else the interpreter complains when it flushes at its end
    return CLOSED_PIPE


def _failed(error: OSError) -> int:
    """Say what could not be read or written; what is left of the output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return _say(f"{error.filename or 'the output'}: {error.strerror}", 2)


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return 0 if name else 2
    if name == "--version":
        print(f"mpiring {__version__}")
        return 0
    if name not in COMMANDS:
        if name == "bench":
            return _say("the bench runs under MPI: mpirun -np 8 python -m mpiring.bench", 2)
        return _say(unknown("command", name, [*COMMANDS, TUNE]), 2)
    command = import_module(f"mpiring.commands.{name}")
    return command.run(command.parser().parse_args(arguments[1:]))


def usage() -> str:
    """Return the help: every command with a line."""
    lines = [f"  {name:<10} {line}" for name, line in COMMANDS.items()]
    return "\n".join([
        "usage: python -m mpiring COMMAND ...", "", *lines, "",
        "python -m mpiring COMMAND --help says more, with examples. These run under MPI:",
        f"  mpirun -np 8 python -m mpiring {TUNE}    measure which algorithm is fastest here, for 'auto'",
        "  mpirun -np 8 python -m mpiring.bench   time algorithms against each other"])


def _say(problem: str, status: int) -> int:
    sys.stdout.flush()
    print(f"error: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
