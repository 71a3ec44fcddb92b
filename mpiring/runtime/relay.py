"""Messages between nodes while the node works: a lane's plans, run one after the other in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context

import numpy as np

from mpiring.runtime.giveup import give_up
from mpiring.runtime.plan import Plan, Task


class Relay:
    """The segments of one plan on their way through a lane: submitted in order, and waited for in order.

    make: makes the plan that reduces a buffer with the lane's other ranks. check: a plan that runs before the first segment, where
    not every rank of the lane learns from a segment that another one failed.

    All ranks of a lane fail in the same segment, and none of them runs a later one.
    """

    def __init__(self, worker: Executor, make: Callable[[np.ndarray], Plan], check: Plan | None = None):
        self.worker, self.make, self.check = worker, make, check
        self.plans: dict[tuple[int, int], Plan] = {}
        self.pending: deque[Future] = deque()
        self.segments = self.left = 0
        self.error: Exception | None = None

    def begin(self, segments: int) -> None:
        """Take note how many segments the run that starts will submit."""
        self.segments = self.left = segments
        self.error = None

    def submit(self, buffer: np.ndarray) -> Task:
        """Return the task that starts the reduction of a buffer with the lane's other ranks."""
        key = buffer.ctypes.data, buffer.size
        if key not in self.plans:
            self.plans[key] = self.make(buffer)
        return self._submit, (self.plans[key],)

    def wait(self) -> Task:
        """Return the task that waits for the oldest reduction under way; it raises what that raised."""
        return self._wait, ()

    def abort(self, error: Exception) -> None:
        """Let the lane's other ranks fail in their next reduction, unless they have failed, or have no more."""
        while self.pending:
            self.pending.popleft().exception()
        if self.left and self.error is None:
            plan = self.check if self.check and self.left == self.segments else next(iter(self.plans.values()))
            nothing = [None] * len(plan.moves)
            self.worker.submit(give_up, plan, 0, [*nothing], [*nothing], error).result()

    def _submit(self, plan: Plan) -> None:
        checks = [self.check] if self.check and self.left == self.segments else []
        self.left -= 1
        self.pending.append(self.worker.submit(copy_context().run, self._run, [*checks, plan]))     # np.errstate goes along

    def _run(self, plans: list[Plan]) -> None:
        """Run plans, in the thread, unless one of an earlier segment has failed."""
        if self.error is not None:
            raise self.error
        try:
            for plan in plans:
                plan()
        except Exception as error:
            self.error = error
            raise

    def _wait(self) -> None:
        self.pending.popleft().result()
