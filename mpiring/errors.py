"""The errors that are mpiring's own; wrong arguments are plain TypeError and ValueError."""


class MismatchError(RuntimeError):
    """Ranks disagree about one collective call: its count, dtype, op or algorithm."""

    final = True


class PeerError(RuntimeError):
    """Another rank gave up in the middle of a collective call. `final`: before it had begun, so that all learn of it."""

    final = False


class StallError(RuntimeError):
    """An operation waited longer for other ranks than it may; says for which, and how long."""


class ShutdownError(RuntimeError):
    """The engine was shut down, by this rank or another one, before an operation was complete."""


class ScheduleError(ValueError):
    """A schedule is wrong; carries the place: `rank`, `step` and `chunk` (None where it does not apply)."""

    def __init__(self, why: str, rank: int | None = None, step: int | None = None, chunk: int | None = None):
        place = [f"{name} {value}" for name, value in (("rank", rank), ("step", step), ("chunk", chunk)) if value is not None]
        super().__init__(f"{', '.join(place)}: {why}" if place else why)
        self.rank, self.step, self.chunk = rank, step, chunk
