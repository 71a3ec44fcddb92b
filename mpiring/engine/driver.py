"""Who moves a process set's rounds on: the caller that waits for an operation, else a thread of the set's own.

To hand work to a thread and back takes two wake-ups, of some 40 us each where cores sleep: more than a small exchange. So who waits
works. While all callers are elsewhere, the thread does; it sleeps, without looking, when there has been nothing to do for a while.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiring.runtime.barrier import give_way
from mpiring.runtime.plan import LOOKS

try:
    import _signal  # in half a microsecond what takes the module over it ten
except ImportError:
    _signal = signal

if TYPE_CHECKING:
    from mpiring.engine.loop import Loop

SPIN = 2e-4
"""Seconds, for each rank on a core, in which a thread that waits for others gives its core away between looks; then it sleeps."""

PATIENCE, NAP, LONG_NAP, SHORT_NAP = 16, 1e-3, 5e-3, 3e-5
"""A sleep between looks takes a PATIENCEth of the time waited so far, but no longer than a NAP, after a second a LONG_NAP."""

GATHERED = 20
"""Cycle times that pass at most before the thread begins a round, while operations go on coming."""

QUICK = 3e-4
"""Seconds since the last operation, up to which others are taken to follow at once: its caller may just have been interrupted."""

CROWDED = 8
"""Factor of these times, times the ranks for each core, where ranks take turns on cores: a caller that submits one operation
after another may not run for some milliseconds, while its thread does.
"""

ALERT = 0.02
"""Seconds after the last operation for which the thread looks for new ones once a cycle; to wake it costs the caller more."""

LEAST_CYCLE = 1e-4
"""Seconds between looks, at least."""

BESIDE = 5e-3
"""Seconds between looks of the thread while somebody else does its work."""


class Driver:
    """Sees to it that at any time one thread, or none, moves a loop on."""

    def __init__(self, loop: Loop, threaded: bool):
        self.loop, self.lock = loop, loop.lock
        self.work, self.free = threading.Condition(self.lock), threading.Condition(self.lock)
        self.taken = self.asleep = False
        self.active = perf_counter()
        self.seen = 0
        crowded = loop.crowd * CROWDED if loop.crowd > 1 else 1
        self.cycle, self.quick = max(loop.settings.cycle_time, LEAST_CYCLE) * crowded, QUICK * crowded
        self.thread = threading.Thread(target=self._run, name="mpiring-engine", daemon=True) if threaded else None

    def wake(self) -> None:
        """Let the thread look, if it sleeps."""
        with self.lock:
            self.work.notify()

    def wait(self, over: Callable[[], bool]) -> None:
        """Wait until something is over; do the work meanwhile, unless another thread does."""
        with Interrupts() as interrupts:
            while not over() and not interrupts.caught:
                with self.lock:
                    if self.taken:
                        self.loop.exchanges.mover.patience(False)        # the core that it left to its caller is free now
                        if not over():
                            self.free.wait(None if interrupts.idle else BESIDE)
                        continue
                    self.taken = True
                self.loop.exchanges.mover.patience(False)
                self._drive(lambda: over() or interrupts.caught)

    def _drive(self, over: Callable[[], bool]) -> None:
        try:
            drive([self.loop], over)
        finally:
            with self.lock:
                self.taken, self.active = False, perf_counter()
                self.free.notify_all()

    def _run(self) -> None:
        """Be the thread."""
        loop = self.loop
        while True:
            with self.lock:
                self._rest()
                if loop.ended:
                    return
                if self.taken or not self._due():
                    continue
                self.taken = True
            loop.exchanges.mover.patience(True)          # the caller computes
            try:
                self._drive(lambda: loop.ended or not loop.busy)
            except BaseException as error:
                loop.break_down(error)
                raise

    def _rest(self) -> None:
        """Sleep until there may be something to do."""
        if self.loop.busy:
            self.work.wait(BESIDE if self.taken else self.cycle)
        elif perf_counter() - self.active < ALERT:
            self.work.wait(self.cycle)
        elif not self.loop.ended:
            self.asleep = True
            if not self.loop.busy:
                self.work.wait()
            self.asleep = False
            self.active = perf_counter()

    def _due(self) -> bool:
        """Tell whether to begin: not while operations come in quick succession, unless they have waited for long.

        Those that come one by one, as gradients do, are begun with as soon as they fill a burst.

        To begin among submissions would be slow: two threads would take the interpreter from each other at every step.
        """
        loop = self.loop
        if loop.news or not loop.queue:
            return loop.busy
        queue = list(loop.queue)                         # at one stroke: callers add to it without a lock
        more, self.seen = len(queue) != self.seen, len(queue)
        now = perf_counter()
        if not more or now - queue[0].submitted > GATHERED * self.cycle:
            return True
        return now - queue[-1].submitted > self.quick and sum([one.nbytes for one in queue]) >= loop.settings.fusion_threshold


def drive(loops: Sequence[Loop], over: Callable[[], bool]) -> None:
    """Move loops on, once at least, until something is over: first giving the core away between looks, then asleep."""
    begun, moved, looks, spin = perf_counter(), -1, 0, SPIN * max([loop.crowd for loop in loops])
    with np.errstate(all="ignore"):                      # of whose array it is that overflows nobody would know
        while True:
            now = sum([loop.advance() for loop in loops])
            if over():
                return
            if now != moved:
                begun, moved = perf_counter(), now
                continue
            waited = perf_counter() - begun
            if waited < spin:
                give_way()
            elif looks:
                looks -= 1
            else:
                time.sleep(nap(waited))
                looks = LOOKS if any([loop.board is None for loop in loops]) else 0      # a board is read at one look
                for loop in loops:
                    loop.watch.look()


class Interrupts:
    """Holds back Ctrl-C while the main thread does the engine's work: raised at the end of the block, with nothing left half done.

    The second one is not held back.
    """

    caught, before = False, None

    def __enter__(self) -> Interrupts:
        if threading.get_ident() == _MAIN and _signal.getsignal(_SIGINT) is _signal.default_int_handler:
            self.before = _signal.signal(_SIGINT, self._catch)
        return self

    @property
    def idle(self) -> bool:
        """Whether nothing is held back."""
        return self.before is None

    def _catch(self, number: int, frame: Any) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = True

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            _signal.signal(_SIGINT, self.before)
            if self.caught:
                raise KeyboardInterrupt


_MAIN, _SIGINT = threading.main_thread().ident, int(signal.SIGINT)


def nap(waited: float) -> float:
    """Return the seconds to sleep before the next look."""
    return min(max(waited / PATIENCE, SHORT_NAP), NAP if waited < 1 else LONG_NAP)
