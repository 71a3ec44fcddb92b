"""Run a program on every rank; one that fails ends them all: mpirun -np 4 python -m mpiring.run program.py ARGUMENTS."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType

from mpiring import failfast
from mpiring.__main__ import RANKS

USAGE = """usage: mpirun -np N python -m {command} program.py [ARGUMENT ...]
       mpirun -np N python -m {command} -m module [ARGUMENT ...]

{about}
A rank that raises, or ends with a status that is not 0, ends the whole job: with its traceback, and with its exit status."""

ABOUT = "Runs a Python program on every rank, as python does."


def main(argv: Sequence[str] | None = None, command: str = "mpiring.run", about: str = ABOUT) -> int:
    """Run the program of a command line; return the exit status, if all ranks are not ended together."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in ([], ["-m"]) or (arguments[0].startswith("-") and arguments[0] != "-m"):
        return _explain(arguments, USAGE.format(command=command, about=about))
    try:
        run(arguments)
    except BaseException as error:
        trace = error.__traceback__ = _of_the_program(error.__traceback__)
        return failfast.end_job(error, trace)
    return failfast.end_job(None, None)


def run(arguments: Sequence[str]) -> None:
    """Run a program in this process as Python's main program: a file, a folder or an archive, or -m and a module."""
    path = arguments[0]
    if path == "-m":
        sys.argv[:] = arguments[1:]
        return _run_module(arguments[1])
    sys.argv[:] = arguments
    if not os.path.isfile(path):
        return _run_folder(path)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = _new_main(os.path.abspath(path))
    with io.open_code(main.__file__) as file:
        text = file.read()
    if text[:2] == b"PK":
        return _run_folder(path)
    exec(compile(text, main.__file__, "exec", dont_inherit=True), vars(main))
    return None


def _run_folder(path: str) -> None:
    """Run the __main__.py of a folder or an archive."""
    if not os.path.exists(path):
        raise SystemExit(f"{path}: no such program")
    del sys.path[0]                                      # the folder takes its place
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _run_module(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise SystemExit(f"no module named {name}")
    main = _new_main(spec.origin)
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    sys.argv[0] = spec.origin
    exec(spec.loader.get_code(spec.name), vars(main))
    return None


def _new_main(path: str | None) -> ModuleType:
    """Put a fresh module in the place of __main__, for good: threads and exit handlers of the program find it there too."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__, main.__builtins__ = path, builtins
    return main


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that led to the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _explain(arguments: Sequence[str], usage: str) -> int:
    """Say how to use the command: asked for, once; not asked for, on each rank, lest the first one to end take the words away."""
    if arguments[:1] not in (["-h"], ["--help"]):
        print(usage, file=sys.stderr)
        return 2
    if next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0":
        print(usage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
