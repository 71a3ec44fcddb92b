"""The house: imports point one way only, and the lower floors need no MPI."""

import ast
import subprocess
import sys
from pathlib import Path

import mpiring

ROOT = Path(mpiring.__file__).parent
FLOORS = ["version", "errors", "units", "algorithms", "analysis", "select", "commands", "runtime", "arguments", "planning",
          "arrays", "collectives", "requests", "engine", "workers", "failfast", "run", "torch", "horovod", "bench"]


def imported(path):
    """Yield the names of the modules that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(module):
    return FLOORS.index(module.split(".")[1])


def test_imports_point_downwards():
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue
        for name in imported(path):
            if name.startswith("mpiring.") and name.split(".")[1] in FLOORS:
                assert floor(name) <= FLOORS.index(parts[0]), f"{path.relative_to(ROOT)} imports {name}"


def test_the_first_floors_import_neither_mpi_nor_numpy():
    """But for what prices schedules: that needs arrays."""
    for place in ("errors.py", "algorithms", "analysis", "commands"):
        for path in [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"):
            allowed = {"numpy"} if path.name in ("cost.py", "cover.py", "fit.py", "links.py", "rounds.py") else set()
            assert not {name.split(".")[0] for name in imported(path)} & {"mpi4py", "numpy"} - allowed, path


def test_proofs_and_prices_load_no_mpi():
    code = ("import sys, mpiring; mpiring.verify('ring', 4); import mpiring.analysis.cost, mpiring.__main__; "
            "print('mpi4py' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_public_names():
    assert sorted(mpiring.__all__) == mpiring.__all__ or set(mpiring.__all__) == set(dir(mpiring)) & set(mpiring.__all__)
    for name in mpiring.__all__:
        assert getattr(mpiring, name) is not None
        assert name == "__version__" or name == "AVERAGE" or getattr(mpiring, name).__doc__


def test_no_module_writes_to_standard_output():
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in ("bench", "commands", "__main__.py", "run.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), path


def test_every_environment_variable_is_in_the_readme():
    readme = (ROOT.parent / "README.md").read_text()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("MPIRING_"):
                assert f"`{node.value.split()[0]}`" in readme, node.value


def test_importing_needs_nothing_optional():
    code = ("import sys; import mpiring, mpiring.bench.__main__; "
            "print([m for m in ('cupy', 'matplotlib', 'ml_dtypes', 'sklearn', 'torch') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
