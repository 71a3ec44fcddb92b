"""Allreduces that a caller starts, and waits for later: once (iallreduce), or as often as is wanted (allreduce_init)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from mpi4py import MPI

from mpiring.algorithms.registry import Algorithm
from mpiring.arguments import Arguments, parse, rank_of, result_of
from mpiring.planning import plan_for
from mpiring.runtime.native import NativePlan


class Request:
    """An allreduce under way."""

    def __init__(self, future: Future, result: Any):
        self._future, self._result = future, result

    def test(self) -> bool:
        """Tell whether it is over; wait() then returns, or raises, at once."""
        return self._future.done()

    def wait(self) -> Any:
        """Wait until it is over; return the array that holds the result, or raise what the call would have raised."""
        self._future.result()
        return self._result


class PersistentPlan:
    """One allreduce on the same buffers, to run as often as is wanted: plan(), or plan.start() and plan.wait().

    algorithm: what runs. path: which way it takes, known after the first run: "messages", "native", "one pass", "process_vm" or
    "staged". A call costs little more than the MPI library's; start() hands over to that, or to a thread, and returns.
    """

    def __init__(self, arguments: Arguments, result: Any):
        self._arguments, self._result = arguments, result             # keeps the buffers alive
        self._run = run = plan_for(arguments)
        native = isinstance(run, NativePlan)
        self._beside = run if native else plan_for(arguments, background=True)
        self._under_way: Callable[[], Any] | None = None
        self.algorithm = run.algorithm

    @property
    def path(self) -> str:
        """Which way the last run took."""
        return self._run.path or self._beside.path

    def __call__(self) -> Any:
        """Run, and return the array that holds the result. Collective; so is start."""
        if self._under_way is not None or self._run.gone:
            raise RuntimeError(self._why_not())
        self._run()
        return self._result

    def _why_not(self) -> str:
        return f"what the plan runs on was freed {self._run.gone}" if self._run.gone else "the plan is under way: wait() first"

    def start(self) -> None:
        """Begin a run and return; neither buffer may be touched until wait() has returned."""
        if self._under_way is not None or self._run.gone:
            raise RuntimeError(self._why_not())
        self._under_way = _start(self._arguments, self._beside)

    def wait(self) -> Any:
        """Wait for the run that start() began; return the array that holds the result."""
        if self._under_way is None:
            raise RuntimeError("the plan is not under way: start() first")
        finish, self._under_way = self._under_way, None
        finish()
        return self._result


def allreduce_init(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
                   algorithm: str | Algorithm = "auto") -> PersistentPlan:
    """Plan an allreduce to run many times on the same buffers; nothing is reduced yet. Arguments and errors as for allreduce.

    All ranks must call, and run their plans of one comm in the same order. The plan keeps the buffers alive; they must stay as
    they are.
    """
    try:
        arguments = parse("allreduce", algorithm, sendbuf, recvbuf, op, comm)
        return PersistentPlan(arguments, result_of(arguments, sendbuf, recvbuf))
    except (TypeError, ValueError) as error:
        raise type(error)(f"allreduce_init on rank {rank_of(comm)}: {error}") from None


def iallreduce(sendbuf: Any, recvbuf: Any = None, *, op: Any = MPI.SUM, comm: MPI.Comm = MPI.COMM_WORLD,
               algorithm: str | Algorithm = "auto") -> Request:
    """Start an allreduce and return; meant for large arrays, while the caller computes. Arguments and errors as for allreduce.

    Returns a Request: wait() waits and returns the array that holds the result, test() tells whether it is over. Until then neither
    buffer may be touched. All ranks must start their allreduces on one comm in the same order. It runs in a thread, with messages
    and memory of its own, which the first one on a comm makes together with all ranks. Where MPI was not initialised for several
    threads, it is over when this returns.
    """
    try:
        arguments = parse("allreduce", algorithm, sendbuf, recvbuf, op, comm)
        plan = plan_for(arguments, background=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"iallreduce on rank {rank_of(comm)}: {error}") from None
    return Request(_submit(arguments, plan), result_of(arguments, sendbuf, recvbuf))


def _start(arguments: Arguments, plan: Any) -> Callable[[], Any]:
    """Begin a run; return the function that waits for it."""
    return plan.start() if isinstance(plan, NativePlan) else _submit(arguments, plan).result


def _submit(arguments: Arguments, plan: Any) -> Future:
    """Let the comm's thread run a plan, as the caller would: with its NumPy settings (np.errstate), on its GPU stream."""
    context, space = copy_context(), arguments.space
    stream = space.stream()

    def run() -> None:
        with space.on(stream):
            context.run(plan)

    return plan.channel.worker.submit(run)
