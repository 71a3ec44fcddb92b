"""How tests start programs: with the Makefile's settings, and so that one that hangs neither hangs its test nor leaves ranks."""

import os
import re
import time

import pytest

from launch import ROOT, SETTINGS, run


def test_a_hanging_program_is_killed_with_all_its_ranks(tmp_path):
    program = tmp_path / "hang.py"
    program.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)\n")
    with pytest.raises(AssertionError, match="not ended after 2 s, killed: mpirun -np 2") as caught:
        run(2, [str(program)], timeout=2)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", str(caught.value))]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("ending", ["", "time.sleep(1000)"])
def test_a_launch_leaves_no_files_that_a_later_one_would_trip_over(tmp_path, ending):
    program = tmp_path / "files.py"
    program.write_text("import os, time\n"
                       "print('files are in', os.environ['TMPDIR'], flush=True)\n" + ending)
    if ending:
        with pytest.raises(AssertionError) as caught:
            run(1, [str(program)], timeout=2)
        printed = str(caught.value)
    else:
        printed = run(1, [str(program)]).stdout
    assert not os.path.exists(re.search("files are in (.*)", printed)[1])


def test_the_makefile_and_the_tests_set_the_same():
    lines = [line.removeprefix("export ") for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("export ")]
    assert dict(line.split(" = ") for line in lines) == SETTINGS
