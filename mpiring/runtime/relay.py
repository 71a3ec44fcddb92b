"""Messages between nodes while the node works: a lane's plans, run one after the other in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np

from mpiring.runtime.giveup import give_up
from mpiring.runtime.plan import Plan, Task


class Relay:
    """The segments of one plan on their way through a lane: submitted in order, and waited for in order."""

    def __init__(self, worker: Executor, make: Callable[[np.ndarray], Plan]):
        self.worker, self.make = worker, make
        self.plans: dict[tuple[int, int], Plan] = {}
        self.pending: deque[Future] = deque()
        self.left = 0

    def begin(self, segments: int) -> None:
        """Take note how many segments the run that starts will submit."""
        self.left = segments

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
        """Let the lane's other ranks fail in their next reduction, after those under way have ended."""
        while self.pending:
            self.pending.popleft().exception()
        if self.left:
            plan = next(iter(self.plans.values()))
            nothing = [None] * len(plan.moves)
            self.worker.submit(give_up, plan, 0, [*nothing], [*nothing], error).result()

    def _submit(self, plan: Plan) -> None:
        self.left -= 1
        self.pending.append(self.worker.submit(plan))

    def _wait(self) -> None:
        self.pending.popleft().result()
