"""Draw a schedule as text: ranks across, rounds down, and in every cell what the rank sends to whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.algorithms.step import Chunks, Step
from mpiring.analysis.replay import Round, replay
from mpiring.analysis.verify import Proof, prove
from mpiring.units import count

ADDS, COPIES = "+>", "=>"


class Move(NamedTuple):
    """A message of a round: who sends which chunks to whom, and whether the receiver adds them or keeps a copy."""

    sender: int
    receiver: int
    chunks: Chunks
    adds: bool


def moves(steps: Round) -> list[Move]:
    """Return the messages of a round, in the order of their senders."""
    return [Move(rank, step.send_to, step.send, steps[step.send_to].reduce)
            for rank, step in enumerate(steps) if step.send_to is not None]


def text(algorithm: Algorithm, setting: Setting, width: int = 100) -> str:
    """Draw a schedule in lines of at most `width` characters, where a single rank's column is not wider.

    Ranks that do not fit beside each other stand in blocks below each other. Raises ScheduleError for a wrong schedule.
    """
    proof = prove(algorithm, setting)
    rounds = list(replay(algorithm, setting))
    chunks = algorithm.chunks(setting)
    rows = [[cell(step, steps, chunks) for step in steps] for steps in rounds]
    lines = [headline(algorithm, setting), summary(algorithm, setting, proof), ""]
    lines += [line for block in _blocks(rows, setting.size, width) for line in _table(rounds, rows, block)]
    return "\n".join([*lines, *_legend(" ".join(lines[3:]))]) + "\n"


def headline(algorithm: Algorithm, setting: Setting) -> str:
    """Say what is drawn: algorithm, collective, ranks and chunks."""
    collective, chunks = algorithm.collective, algorithm.chunks(setting)
    root = f", root {setting.root}" if collective.rooted else ""
    nodes = f" on {count(len(setting.members), 'node')}" if setting.nodes else ""
    cut = "the vector is one chunk, c0" if chunks == 1 else f"the vector is cut into chunks c0 to c{chunks - 1}"
    if collective.name == "alltoall":
        cut = f"chunk c(i * {setting.size} + j) is what rank i has for rank j"
    return f"{collective.name} by {algorithm.name}, {count(setting.size, 'rank')}{nodes}{root}: {cut}"


def summary(algorithm: Algorithm, setting: Setting, proof: Proof) -> str:
    """Say what the proof found, in a line."""
    order = "; sums keep the order of ranks" if algorithm.collective.reduces and proof.ordered else ""
    return (f"{count(proof.rounds, 'round')}, {count(proof.messages, 'message')}; the busiest rank sends {proof.sent} "
            f"{'vector' if proof.sent == 1 else 'vectors'}{order}")


def cell(step: Step, steps: Round, chunks: int) -> str:
    """Write what a rank does in a round: `c7 +>1`, `c7 =>1`, or, where it only receives, `<1`."""
    if step.send_to is not None:
        return f"{chunk_names(step.send, chunks)} {ADDS if steps[step.send_to].reduce else COPIES}{step.send_to}"
    return "." if step.recv_from is None else f"<{step.recv_from}"


def chunk_names(chunks: Chunks, of: int) -> str:
    """Write some of `of` chunks shortly: c3, c0-3, c6-1 round the end, c1,5 or, where they make many runs, c0,..(12) for 12."""
    runs = list(_runs(chunks))
    if len(runs) == 2 and runs[0][1] == of - 1 and runs[1][0] == 0:
        return f"c{runs[0][0]}-{runs[1][1]}"
    if len(runs) > 2:
        return f"c{chunks[0]},..({len(chunks)})"
    return "c" + ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _runs(chunks: Chunks) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of chunks that follow one another."""
    first = last = None
    for chunk in chunks:
        if last is not None and chunk == last + 1:
            last = chunk
            continue
        if last is not None:
            yield first, last
        first = last = chunk
    if last is not None:
        yield first, last


def _blocks(rows: Sequence[Sequence[str]], size: int, width: int) -> Iterator[range]:
    """Yield the ranks that fit beside each other."""
    widest = max((len(entry) for row in rows for entry in row), default=0)
    fit = max(1, (width - len("round")) // (max(widest, len(f"rank {size - 1}")) + 2))
    fit = -(-size // -(-size // fit))                    # blocks of about the same length
    for first in range(0, size, fit):
        yield range(first, min(first + fit, size))


def _table(rounds: Sequence[Round], rows: Sequence[Sequence[str]], block: range) -> Iterator[str]:
    """Yield the lines of some ranks; a line of dashes stands where sums end and copies begin."""
    widths = [max(len(f"rank {rank}"), *(len(row[rank]) for row in rows)) if rows else 0 for rank in block]
    yield "  ".join(["round", *(f"rank {rank}".ljust(width) for rank, width in zip(block, widths))]).rstrip()
    for index, row in enumerate(rows):
        if index and _adds(rounds[index - 1]) and not any(_adds(steps) for steps in rounds[index:]):
            yield "  ".join(["-----", *("-" * width for width in widths)])
        yield "  ".join([f"{index:>5}", *(row[rank].ljust(width) for rank, width in zip(block, widths))]).rstrip()
    yield ""


def _adds(steps: Round) -> bool:
    return any(step.reduce for step in steps)


def _legend(table: str) -> Iterator[str]:
    """Yield what the signs mean that occur."""
    signs = (
        (rf"\{ADDS}", f"c3 {ADDS}1    sends chunk 3 to rank 1, which adds it to its own"),
        (COPIES, f"c3 {COPIES}1    sends chunk 3 to rank 1, which keeps it as it is"),
        (r"c\d+-", "c0-2      chunks 0 to 2; where the first is the larger one, they go on at chunk 0"),
        (r",\.\.", "c1,..(4)  four chunks, the first of them chunk 1"),
        (r" <", "<1        only receives, from rank 1"),
        (r" \. ", ".         does nothing"),
        (r"-----", "-----     sums above, copies below"))
    for sign, meaning in signs:
        if re.search(sign, f" {table} "):
            yield f"  {meaning}"
