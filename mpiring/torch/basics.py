"""Begin, end, and who is where. Horovod's names for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from mpiring import failfast
from mpiring.engine.engine import Engine
from mpiring.torch import process_sets as sets
from mpiring.torch.process_sets import ProcessSet, comm_among, engine

__all__ = ["Basics", "engine"]


class _Place(NamedTuple):
    """Where this rank is: among those of its node, and among those that have its place on their nodes."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


class Basics:
    """What is known of the running job, and the numbers of the ops. One for the process."""

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __init__(self) -> None:
        self._place: _Place | None = None

    def init(self, comm: MPI.Comm | Sequence[int] | None = None,
             process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Begin; all ranks of comm must call this. Nothing happens if that was done already.

        comm: the ranks that take part: None for all, some ranks of COMM_WORLD (then only these call), or an mpi4py communicator.
        process_sets: sets of ranks, known from the start; "dynamic": sets may be added and removed later on.

        Raises ValueError for wrong arguments, NotImplementedError for sets of communicators where comm is not one.
        """
        if self.is_initialized():
            return
        if not MPI.Is_initialized():
            raise ValueError("init: MPI has not begun in this process: what a rank has started (a data loader's worker, say) is "
                             "no rank: put the program under `if __name__ == '__main__':`")
        _check_sets(process_sets, comm)
        made = _engine_on(comm)
        failfast.install()
        try:
            sets._registry.open(made, process_sets)
            self._place = _place_in(made.comm)
        except BaseException:
            sets._registry.close()
            made.shutdown()
            raise

    def shutdown(self) -> None:
        """End. What is not complete fails with HorovodInternalError. init may follow."""
        if self.is_initialized():
            running = engine()
            sets._registry.close()
            self._place = None
            running.shutdown()

    def is_initialized(self) -> bool:
        """Tell whether init was called, and shutdown was not."""
        return sets._registry.engine is not None

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Write a trace from now on, a file for each rank: trace.json is trace.rank3.json on rank 3.

        mark_cycles: for Horovod's scripts. The engine has no fixed cycles; its rounds are always part of the trace.
        """
        engine().start_timeline(file_path)

    def stop_timeline(self) -> None:
        """Complete the trace."""
        engine().stop_timeline()

    def rank(self) -> int:
        """Return this rank's number."""
        return engine().rank

    def size(self) -> int:
        """Return the number of ranks."""
        return engine().size

    def local_rank(self) -> int:
        """Return this rank's number among those of its node."""
        return self._found().local_rank

    def local_size(self) -> int:
        """Return the number of ranks on this node."""
        return self._found().local_size

    def cross_rank(self) -> int:
        """Return this rank's number among those of all nodes that have its local rank."""
        return self._found().cross_rank

    def cross_size(self) -> int:
        """Return the number of nodes that have a rank with this one's local rank."""
        return self._found().cross_size

    def is_homogeneous(self) -> bool:
        """Tell whether every node has as many ranks."""
        return self._found().homogeneous

    def _found(self) -> _Place:
        engine()
        return self._place

    def mpi_threads_supported(self) -> bool:
        """Tell whether MPI may be called from several threads."""
        engine()
        return MPI.Query_thread() >= MPI.THREAD_MULTIPLE

    def mpi_enabled(self) -> bool:
        """Tell whether MPI is in use: always."""
        return True

    def mpi_built(self) -> bool:
        """Tell whether MPI can be used: always."""
        return True

    def gloo_enabled(self) -> bool:
        """Tell whether gloo is in use: never."""
        return False

    def gloo_built(self) -> bool:
        """Tell whether gloo can be used: never."""
        return False

    def nccl_built(self) -> int:
        """Return the version of NCCL: 0, it is not used."""
        return 0

    def ddl_built(self) -> bool:
        """Tell whether IBM's DDL can be used: never."""
        return False

    def ccl_built(self) -> bool:
        """Tell whether Intel's oneCCL can be used: never."""
        return False

    def cuda_built(self) -> bool:
        """Tell whether CUDA tensors can be used: where PyTorch knows CUDA and CuPy is installed."""
        return torch.version.cuda is not None and find_spec("cupy") is not None

    def rocm_built(self) -> bool:
        """Tell whether tensors on AMD GPUs can be used: never."""
        return False


def _check_sets(process_sets: Any, comm: Any) -> None:
    """Refuse process sets that init does not take, before anything is sent."""
    if process_sets is None or process_sets == "dynamic":
        return
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable) or not all(
            isinstance(each, ProcessSet) for each in process_sets):
        raise ValueError(f'process_sets is neither a list of ProcessSet nor "dynamic": {process_sets!r}')
    if not isinstance(comm, MPI.Comm) and any(each.mpi_comm is not None for each in process_sets):
        raise NotImplementedError("process sets of communicators need a communicator as init's comm")


def _engine_on(comm: Any) -> Engine:
    """Make the engine among some ranks; ValueError where `comm` does not say which."""
    if comm is None or isinstance(comm, MPI.Comm):
        return _started(MPI.COMM_WORLD if comm is None else comm)
    try:
        ranks = [*comm]
    except TypeError:
        raise ValueError(f"comm is neither a list of ranks nor an mpi4py Comm: {comm!r}") from None
    if not ranks:                                        # as Horovod has it: all
        return _started(MPI.COMM_WORLD)
    made = _comm_of(ranks)
    try:
        return _started(made)
    finally:
        made.Free()


def _started(comm: MPI.Comm) -> Engine:
    try:
        return Engine(comm)
    except TypeError as error:                           # an inter-communicator, or a setting that is wrong
        raise ValueError(str(error)) from error


def _comm_of(ranks: list[Any]) -> MPI.Comm:
    world = MPI.COMM_WORLD
    if any(type(rank) is not int or not 0 <= rank < world.size for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"comm {ranks} are not different ranks of the {world.size} of COMM_WORLD")
    if world.rank not in ranks:
        raise ValueError(f"comm {ranks} does not have rank {world.rank} of COMM_WORLD, which must not call init then")
    return comm_among(ranks, world)


def _place_in(comm: MPI.Comm) -> _Place:
    """Find this rank's place; collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    cross = comm.Split(local.rank, comm.rank)
    sizes = comm.allgather(local.size)
    place = _Place(local.rank, local.size, cross.rank, cross.size, len(set(sizes)) == 1)
    cross.Free()
    local.Free()
    return place


_basics = Basics()

init, shutdown, is_initialized = _basics.init, _basics.shutdown, _basics.is_initialized
start_timeline, stop_timeline = _basics.start_timeline, _basics.stop_timeline
rank, size = _basics.rank, _basics.size
local_rank, local_size = _basics.local_rank, _basics.local_size
cross_rank, cross_size = _basics.cross_rank, _basics.cross_size
is_homogeneous, mpi_threads_supported = _basics.is_homogeneous, _basics.mpi_threads_supported
mpi_enabled, mpi_built = _basics.mpi_enabled, _basics.mpi_built
gloo_enabled, gloo_built = _basics.gloo_enabled, _basics.gloo_built
nccl_built, ddl_built, ccl_built = _basics.nccl_built, _basics.ddl_built, _basics.ccl_built
cuda_built, rocm_built = _basics.cuda_built, _basics.rocm_built
