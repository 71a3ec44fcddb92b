"""Programs run by mpiring.run, and by plain python after failfast.install(): how they see themselves, and how they end."""

import sys
import time

import pytest

from launch import finish

RUNNER = ["-m", "mpiring.run"]

WAITING = """
import os, signal, sys, threading, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
MPI.COMM_WORLD.Barrier()
open(f"{sys.argv[0]}.begun", "w").close()
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that runs a program of these lines on some ranks, and notes how long that took after it had begun."""
    def start(ranks, body, runner=(), arguments=(), timeout=60):
        path, mark = tmp_path / "program.py", tmp_path / "program.py.begun"
        path.write_text(body)
        begun = time.time()
        done = finish(["mpirun", "-np", str(ranks), sys.executable, *runner, str(path), *arguments], timeout)
        done.seconds = time.time() - (mark.stat().st_mtime if mark.exists() else begun)
        return done

    return start


# ----------------------------------------------------------------- how a program sees itself

ITSELF = """
import __main__, sys, os, pickle, beside
class Own: pass
assert pickle.loads(pickle.dumps(Own)) is Own is __main__.Own
print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__, beside.VALUE, globals() is vars(__main__))
"""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m", "x", "--flag=1", "a b"]])
def test_a_program_is_run_as_python_runs_it(start, tmp_path, arguments):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    plain, ours = (start(1, ITSELF, runner, arguments) for runner in ([], RUNNER))
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


def test_a_module_is_run_as_python_runs_it(tmp_path, monkeypatch):
    """And a package, by its __main__."""
    text = ("import __main__, sys\nfrom .part import VALUE\nfrom . import part\n"
            "print(__name__, __file__, sys.argv, __package__, VALUE, __spec__.name, globals() is vars(__main__))\n")
    package = tmp_path / "package"
    package.mkdir()
    for name, lines in {"__init__": "", "part": "VALUE = 7\n", "module": text, "__main__": text}.items():
        (package / f"{name}.py").write_text(lines)
    monkeypatch.setattr("launch.ROOT", tmp_path)
    for module in ("package", "package.module"):
        plain, ours = (finish([sys.executable, *runner, "-m", module, "--help", "x"], 60) for runner in ([], RUNNER))
        assert plain.returncode == 0, plain.stderr
        assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


def test_a_folder_is_run_by_its_main(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "__main__.py").write_text("import sys, beside\nprint(__name__, sys.argv, beside.VALUE)\n")
    plain, ours = (finish([sys.executable, *runner, str(tmp_path), "x"], 60) for runner in ([], RUNNER))
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


def test_the_program_is_still_there_at_its_end(start):
    """For exit handlers and threads, which pickle classes of the program, too."""
    done = start(1, """
import atexit, pickle, threading, time
class Own: pass
def work():
    time.sleep(0.3)
    print(pickle.loads(pickle.dumps(Own)) is Own)
threading.Thread(target=work).start()
atexit.register(lambda: print(pickle.loads(pickle.dumps(Own)) is Own))
""", RUNNER)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_usage():
    asked = finish([sys.executable, *RUNNER, "--help"], 60)
    assert asked.returncode == 0 and asked.stdout.startswith("usage: mpirun -np N python -m mpiring.run program.py")
    for wrong in ([], ["-m"], ["-x", "program.py"]):
        done = finish([sys.executable, *RUNNER, *wrong], 60)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", asked.stdout)


@pytest.mark.parametrize("wrong, says", [(["no.py"], "no.py: no such program"), (["-m", "no_module"], "no module named no_module")])
def test_a_program_that_is_not_there(wrong, says):
    done = finish([sys.executable, *RUNNER, *wrong], 60)
    assert (done.returncode, done.stderr) == (1, f"{says}\n")


# ----------------------------------------------------------------- how one rank ends all

def ended(done, *says):
    """Check that a job has ended in time, badly, and that a text of one rank says why, once."""
    assert done.returncode != 0
    assert done.seconds < 10, done.seconds
    for text in says:
        assert done.stderr.count(text) == 1, done.stderr


@pytest.mark.parametrize("elsewhere", ["time.sleep(60)", "MPI.COMM_WORLD.Recv(bytearray(1), 1)", "MPI.Finalize()"])
@pytest.mark.parametrize("runner, first", [(RUNNER, ""), ([], "from mpiring import failfast\nfailfast.install()\n")])
def test_a_rank_that_raises_ends_the_job(start, runner, first, elsewhere):
    done = start(3, f"{first}{WAITING}\ndef fails():\n    raise KeyError('of rank 1')\n"
                    f"if rank == 1:\n    print('said', flush=False)\n    fails()\n{elsewhere}\ntime.sleep(60)\n", runner)
    ended(done, "rank 1 of 3 ends the job:\nTraceback (most recent call last):\n", "in fails\n", "KeyError: 'of rank 1'\n")
    assert done.stdout == "said\n"
    assert "mpiring/run.py" not in done.stderr


def test_all_ranks_that_raise(start):
    """Each traceback in one piece."""
    done = start(4, f"{WAITING}\nraise KeyError(rank)\n", RUNNER)
    assert done.returncode != 0 and done.seconds < 10
    assert "ends the job:\nTraceback (most recent call last):\n  File " in done.stderr


def test_a_program_with_a_syntax_error(start):
    done = start(2, "if True:\nx = 1\n", RUNNER)
    assert done.returncode != 0 and done.seconds < 10
    assert "IndentationError: expected an indented block after 'if' statement on line 1" in done.stderr
    assert "in exec" not in done.stderr and "in main" not in done.stderr


@pytest.mark.parametrize("leave, status, says", [
    ("sys.exit(3)", 3, "rank 1 of 2 ends the job with exit status 3\n"),
    ("sys.exit('no data')", 1, "no data\nrank 1 of 2 ends the job with exit status 1\n"),
    ("raise SystemExit(-1)", 255, "rank 1 of 2 ends the job with exit status 255\n")])
def test_a_rank_that_exits_ends_the_job(start, leave, status, says):
    done = start(2, f"{WAITING}\nif rank == 1:\n    {leave}\ntime.sleep(60)\n", RUNNER)
    ended(done, says)
    assert done.returncode in (status, 141)              # Intel's mpirun at times dies of SIGPIPE where a rank aborts


def test_ranks_that_exit_well_are_left_alone(start):
    """sys.exit(0), sys.exit() and the end of the program: the others go on."""
    done = start(3, f"{WAITING}\nif rank < 2:\n    sys.exit([0, None][rank])\ntime.sleep(2)\nprint('done')\n", RUNNER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("runner, first", [(RUNNER, ""), ([], "from mpiring import failfast\nfailfast.install()\n")])
def test_a_rank_that_is_interrupted_ends_the_job(start, runner, first):
    done = start(2, f"""{first}{WAITING}
signal.signal(signal.SIGINT, signal.default_int_handler)
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
time.sleep(60)
""", runner)
    ended(done, "rank 1 of 2 ends the job:\n", "\nKeyboardInterrupt\n")


def test_a_rank_that_fails_before_mpi_begins(start):
    """While the others wait for it in MPI_Init, and where they do without MPI."""
    for elsewhere in ("from mpi4py import MPI", ""):
        done = start(2, f"""
import os, sys, time
if "1" in [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")]:
    open(f"{{sys.argv[0]}}.begun", "w").close()
    raise KeyError("early")
{elsewhere}
time.sleep(60)
""", RUNNER)
        ended(done, "rank 1 ends the job:\n", "KeyError: 'early'\n")


def test_a_programs_own_hook_writes_what_it_likes(start):
    """A hook set before or after install(), the latter passing on to the one before it; one that fails itself is no way out."""
    for hook, order in (("def hook(kind, error, trace):\n    print('mine:', error, file=sys.stderr)\n", "hook install"),
                        ("def hook(kind, error, trace):\n    print('mine:', error, file=sys.stderr)\n"
                         "    before(kind, error, trace)\n", "install hook"),
                        ("def hook(kind, error, trace):\n    raise ValueError(f'mine: {error}')\n", "hook install")):
        put = {"hook": "before = sys.excepthook\nsys.excepthook = hook\n", "install": "failfast.install()\n"}
        program = f"{WAITING}\nfrom mpiring import failfast\n{hook}" + "".join(put[word] for word in order.split())
        done = start(2, f"{program}if rank == 1:\n    raise KeyError('of rank 1')\ntime.sleep(60)\n")
        assert done.returncode != 0 and done.seconds < 10
        assert "rank 1 of 2 ends the job" in done.stderr
        assert "mine: 'of rank 1'" in done.stderr
        assert ("KeyError: 'of rank 1'" in done.stderr) == ("before(" in hook or "ValueError" in hook), done.stderr


def test_a_programs_own_hook_does_not_keep_the_runner_from_ending_the_job(start):
    done = start(2, f"""{WAITING}
sys.excepthook = lambda kind, error, trace: print("mine:", error, file=sys.stderr)
if rank == 1:
    raise KeyError('of rank 1')
time.sleep(60)
""", RUNNER)
    ended(done, "rank 1 of 2 ends the job:\n", "mine: 'of rank 1'\n")
    assert "KeyError" not in done.stderr


@pytest.mark.parametrize("runner", [RUNNER, []])
def test_children_end_as_children_do(start, runner):
    """Forked ones that raise, exit with a status or come to the end, of the runner too, end only themselves; so does a thread."""
    done = start(2, """
from mpiring import failfast
import multiprocessing, warnings
warnings.simplefilter("ignore")
""" + WAITING + """
failfast.install()
failfast.install()
def by_fork(leave):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    exec(leave)

def by_multiprocessing(leave):
    process = multiprocessing.get_context("fork").Process(target=exec, args=(leave,))
    process.start()
    process.join()
    return process.exitcode

assert by_multiprocessing("raise KeyError('of a worker')") == 1
assert by_multiprocessing("sys.exit(5)") == 5
assert by_fork("raise KeyError('of a child')") == 1
if %r:
    assert by_fork("sys.exit(5)") == 5
    status = by_fork("pass")
    if status is None:
        sys.exit()
    assert status == 0
thread = threading.Thread(target=lambda: [][0])
thread.start()
thread.join()
MPI.COMM_WORLD.Barrier()
print("all well", flush=True)
""".replace("%r", str(bool(runner))), runner)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all well") == 2
    assert "ends the job" not in done.stderr
    assert done.stderr.count("Error: 'of a child'") == done.stderr.count("Error: 'of a worker'") == 2


def test_a_rank_that_is_alone_ends_as_python_ends_it(start):
    for runner in (RUNNER, []):
        done = start(1, f"from mpiring import failfast\n{WAITING}\nfailfast.install()\nraise KeyError('alone')\n", runner)
        assert done.returncode == 1
        assert "ends the job" not in done.stderr and "ABORT" not in done.stderr.upper().replace("MPIRUN", "")
        assert done.stderr.count("KeyError: 'alone'") == 1


def test_an_interactive_session_goes_on(start, tmp_path):
    done = start(2, f"import sys\nsys.ps1 = '> '\n{WAITING}\nfrom mpiring import failfast\nfailfast.install()\n"
                    "assert sys.excepthook is sys.__excepthook__\n")
    assert done.returncode == 0, done.stderr
