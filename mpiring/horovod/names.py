"""Let `horovod` be found in this process, and in the Python processes that it starts: horovod.torch is mpiring.torch.

The package itself is in a folder of its own, importable/, which nobody else has on his path. A finder comes before all others: it
takes the package from there, whatever the program has beside it, and makes horovod.torch.x another name of the module
mpiring.torch.x: not a second copy, whose classes would be others. Processes that the program starts (a data loader's workers that
are spawned, say) have the folder on their path; importing the package there brings the finder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from mpiring.workers import leave_mpi_alone

IMPORTABLE = str(Path(__file__).parent / "importable")
"""The folder with the package."""

OURS, THEIRS = "mpiring.torch", "horovod.torch"


def install() -> None:
    """Let `horovod` be found from now on; in a process of multiprocessing, keep MPI from beginning."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    leave_mpi_alone()
    sys.meta_path.insert(0, _Finder())
    if IMPORTABLE not in sys.path:
        sys.path.insert(1, IMPORTABLE)                   # after the program's own folder, as what PYTHONPATH names
    others = os.environ.get("PYTHONPATH")
    if IMPORTABLE not in (others or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{IMPORTABLE}{os.pathsep}{others}" if others else IMPORTABLE


class _Finder:
    """Finds horovod and horovod.torch; the modules of horovod.common are files in their package."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where a module comes from; ImportError, with the reason, for parts of Horovod that mpiring has not."""
        top, _, rest = name.partition(".")
        if top != "horovod":
            return None
        if not rest:
            return PathFinder.find_spec(name, [IMPORTABLE])
        part = rest.partition(".")[0]
        if part == "torch":
            return _alias(name)
        if part != "common":
            raise ImportError(f"mpiring has no {name}: of Horovod's interfaces it has the one for PyTorch, horovod.torch, only",
                              name=name)
        return None


def _alias(name: str) -> ModuleSpec:
    ours = OURS + name.removeprefix(THEIRS)
    found = importlib.util.find_spec(ours)
    if found is None:
        raise ImportError(f"mpiring has no {name}", name=name)
    return ModuleSpec(name, _Alias(ours), origin=found.origin, is_package=found.submodule_search_locations is not None)


class _Alias:
    """Loads a module as another name of one that exists."""

    def __init__(self, ours: str):
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.ours)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own spec, in whose place the import system has put the alias's."""
        module.__spec__ = self.spec
