"""Messages between nodes while the node works: a lane's plans, run one after the other in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context

import numpy as np

from mpiring.runtime.giveup import refuse
from mpiring.runtime.plan import Plan, Task


class Relay:
    """The segments of one plan on their way through a lane: submitted in order, and waited for in order.

    make: makes the plan that reduces a buffer with the lane's other ranks. check: a plan that runs before the first segment, where
    not every rank of the lane learns from a segment that another one failed.

    A rank that fails in a segment, or learns there that another one did, refuses the next one. Who had no need to learn of it, in a
    reduce, does in that one: it is the last for all.
    """

    def __init__(self, worker: Executor, make: Callable[[np.ndarray], Plan], check: Plan | None = None):
        self.worker, self.make, self.check = worker, make, check
        self.plans: dict[tuple[int, int], Plan] = {}
        self.pending: deque[Future] = deque()
        self.submitted = self.left = 0                   # segments; those that have not begun
        self.error: Exception | None = None

    def begin(self, segments: int) -> None:
        """Take note how many segments the run that starts will submit."""
        self.submitted, self.left, self.error = 0, segments, None

    def submit(self, buffer: np.ndarray) -> Task:
        """Return the task that starts the reduction of a buffer with the lane's other ranks."""
        key = buffer.ctypes.data, buffer.size
        if key not in self.plans:
            self.plans[key] = self.make(buffer)
        return self._submit, (self.plans[key],)

    def wait(self) -> Task:
        """Return the task that waits for the oldest reduction under way; it raises what that raised."""
        return self._wait, ()

    def abort(self, error: BaseException) -> None:
        """Let the lane's other ranks fail in their next reduction, unless they all know already, or have no more."""
        while self.pending:
            self.pending.popleft().exception()
        if self.left and not getattr(self.error, "final", False):
            plan = self.check if self.check and not self.submitted else next(iter(self.plans.values()))
            self.worker.submit(refuse, plan, error).result()

    def _submit(self, plan: Plan) -> None:
        checks = [self.check] if self.check and not self.submitted else []
        self.submitted += 1
        self.pending.append(self.worker.submit(copy_context().run, self._run, [*checks, plan]))     # np.errstate goes along

    def _run(self, plans: list[Plan]) -> None:
        """Run plans, in the thread, unless one of an earlier segment has failed."""
        if self.error is not None:
            raise self.error
        self.left -= 1
        try:
            for plan in plans:
                plan()
        except Exception as error:
            self.error = error
            raise

    def _wait(self) -> None:
        self.pending.popleft().result()
