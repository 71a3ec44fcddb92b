"""Start Python programs under mpirun from a test that is not under it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "I_MPI_SPIN_COUNT": "1",
    "I_MPI_THREAD_YIELD": "2",
}
"""What the Makefile exports, for tests that are started without it."""


def run(ranks: int, argv: list[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a Python program with these arguments on some ranks, from the project's folder."""
    return finish(["mpirun", "-np", str(ranks), sys.executable, *argv], timeout)


def environment() -> dict[str, str]:
    """Return the environment for mpirun; the launcher of this interpreter's own environment is found first.

    From os.environ, not from C's: there an MPI library that this process has loaded may have left marks that confuse mpirun.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**SETTINGS, **inherited, "PATH": path}


def finish(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; one that takes too long is killed with all that it started, and the test fails.

    It has a folder for temporary files to itself. Open MPI's mpirun keeps files under its process id there, leaves them when it
    is killed, and refuses to start ("listener thread failed to start") where it finds some of a process that had its id before.
    """
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(command, cwd=ROOT, env={**environment(), "TMPDIR": folder}, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            stdout, stderr = _kill(process)
            raise AssertionError(f"not ended after {timeout} s, killed: {shlex.join(command)}\n{stdout}{stderr}") from None
        except BaseException:
            _kill(process)
            raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def assert_told_once(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    """Check that the bench refused a command line: one error, from one rank, and nothing else."""
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("python -m mpiring.bench: error: ")]
    assert len(errors) == 1 and complaint in errors[0], done.stderr
    assert "Traceback" not in done.stderr


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a process and its session, and return what they wrote. A launcher may give ranks process groups of their own."""
    process.terminate()         # mpirun ends its ranks, on other hosts too
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    return process.communicate()
