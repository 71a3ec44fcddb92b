"""pytest under mpirun: all ranks run the same tests, and a test ends on all of them or the run ends with its name.

A conftest.py imports the hooks. A test that fails on one rank fails on every rank, with that rank's traceback. A rank that is
stuck, or waits for one that has failed, ends the run when the test's deadline is over.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

WORLD = MPI.COMM_WORLD.Dup()
"""For agreement among the ranks, apart from what the tests do on COMM_WORLD."""

DEADLINE = 60.0
"""Seconds a test may take; @pytest.mark.deadline(seconds) sets another."""

STDERR = 2
"""The standard error that pytest does not capture."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 alone speak, and give each rank a root of its own for tmp_path: pytest clears away what another rank has there."""
    global STDERR
    STDERR = os.dup(2)
    config.addinivalue_line("markers", "deadline(seconds): how long the test may take before the run is ended")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if WORLD.rank and reporter:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115
    root = tempfile.TemporaryDirectory(prefix="mpiring-tests-")
    config.add_cleanup(root.cleanup)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = root.name


def pytest_report_header() -> str:
    """Say what runs the tests."""
    return f"MPI: {' '.join(map(str, MPI.get_vendor()))}, {WORLD.size} ranks"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a test's body, then agree on how it ended."""
    marker = pyfuncitem.get_closest_marker("deadline")
    failure: dict[str, str] = {}
    with _deadline(pyfuncitem.nodeid, marker.args[0] if marker else DEADLINE, failure):
        error: BaseException | None = None
        try:
            result = yield
        except BaseException as caught:
            error = caught
            if not isinstance(caught, pytest.skip.Exception):
                failure["text"] = "".join(traceback.format_exception(caught)[-12:])
        found = WORLD.allgather(failure.get("text"))
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(found) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        pytest.fail(f"failed on rank(s) {', '.join(map(str, failed))}; rank {rank}:\n{text}", pytrace=False)
    return result


@contextmanager
def _deadline(name: str, seconds: float, failure: dict[str, str]) -> Iterator[None]:
    """End the run, with the test's name, if the block takes longer than its time."""
    def fire() -> None:
        text = f"\n{name}: not over after {seconds:g} s on rank {WORLD.rank} of {WORLD.size}"
        text += f"; this rank has failed:\n{failure['text']}" if failure else "; this rank is at:\n"
        os.write(STDERR, text.encode())
        if not failure:
            faulthandler.dump_traceback(STDERR)
        MPI.COMM_WORLD.Abort(3)

    timer = threading.Timer(seconds + WORLD.rank * 0.05, fire)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 10, exit=True, file=STDERR)    # for a rank that holds the GIL
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def drawn(strategy: st.SearchStrategy, examples: int = 25) -> Callable:
    """Make a property test of function(case): rank 0 draws, and broadcasts; a case that fails on any rank fails on all."""
    def decorate(function: Callable[[Any], None]) -> Callable[[], None]:
        def attempt(case: Any) -> str | None:
            text = None
            try:
                function(case)
            except Exception:
                text = traceback.format_exc()
            return next((f"rank {rank}, {case}:\n{found}" for rank, found in enumerate(WORLD.allgather(text)) if found), None)

        @settings(max_examples=examples, deadline=None, database=None)
        @given(strategy)
        def lead(case: Any) -> None:
            WORLD.bcast(("case", case))
            text = attempt(case)
            assert text is None, text

        def follow() -> None:
            while (message := WORLD.bcast(None))[0] == "case":
                attempt(message[1])
            assert message[1] is None, message[1]

        @functools.wraps(function, assigned=("__name__", "__doc__", "__module__"), updated=())
        def test() -> None:
            if WORLD.rank:
                return follow()
            outcome: BaseException | None = None
            try:
                lead()
            except BaseException as error:
                outcome = error
            WORLD.bcast(("end", None if outcome is None else str(outcome)))
            if outcome is not None:
                raise outcome

        del test.__wrapped__        # pytest would take the case for a fixture
        return test

    return decorate
