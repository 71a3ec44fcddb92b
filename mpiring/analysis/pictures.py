"""Pictures of schedules and of what they cost, as .svg or .png. Needs matplotlib (extra 'plot')."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.analysis.buckets import Exposure, best
from mpiring.analysis.cost import Estimate, Message, setting_for, simulate
from mpiring.analysis.draw import Move, chunk_names, headline, moves, summary
from mpiring.analysis.machines import Machine
from mpiring.analysis.replay import replay
from mpiring.analysis.verify import prove
from mpiring.units import binary, seconds

ADDS, COPIES = "#c8402f", "#2f6fb0"
"""Colours of a message whose receiver adds it, and of one whose receiver keeps a copy."""

LANE, PALE, INK = "#b9bec5", "#f1f3f6", "#23272e"
COLOURS = ("#2f6fb0", "#c8402f", "#3b9154", "#9458b5", "#d08a1d", "#3aa3a8", "#7a5a3a", "#d0569b", "#5d6570", "#93a52b")
MOST_MESSAGES = 4000


def steps(path: str, algorithm: Algorithm, setting: Setting) -> None:
    """Draw a schedule into a file: ranks across, rounds down, an arrow for every message, labelled where it starts.

    Raises ValueError for a path that is neither .svg nor .png, for too many messages, or where matplotlib is missing;
    ScheduleError for a wrong schedule.
    """
    plt = _plotter(path)
    _check_size(algorithm, setting)
    proof = prove(algorithm, setting)
    _check_messages(proof.messages)
    rounds = [moves(steps) for steps in replay(algorithm, setting)]
    names = [[chunk_names(move.chunks, algorithm.chunks(setting)) for move in around] for around in rounds]
    widest = max((len(name) for around in names for name in around), default=2)
    far = any(abs(move.receiver - move.sender) > 1 and not _closes(move, around, setting.size)
              for around in rounds for move in around)
    width = max(6.8, max(1.0, 0.45 + 0.085 * widest) * setting.size + 1.4)
    height = (0.85 if far else 0.62) * max(1, len(rounds)) + 1.7
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    _lanes(axes, setting, len(rounds))
    for index, (around, labels) in enumerate(zip(rounds, names)):
        for move, label in zip(around, labels):
            _arrow(axes, index, move, _closes(move, around, setting.size), label)
    title = f"{headline(algorithm, setting)}\n{summary(algorithm, setting, proof)}"
    axes.set_title(title, fontsize=10, loc="left", pad=12, color=INK)
    _kinds(figure, {move.adds for around in rounds for move in around})
    _save(plt, figure, path)


def _lanes(axes: Any, setting: Setting, rounds: int) -> None:
    """Draw a line down for every rank, a band for every second round, and the names of nodes."""
    size = setting.size
    for index in range(0, rounds, 2):
        axes.axhspan(index - 0.32, index + 0.68, color=PALE, linewidth=0, zorder=0)
    for rank in range(size):
        axes.plot([rank, rank], [-0.32, rounds - 0.32], color=LANE, linewidth=1, zorder=1)
    several = len(setting.members) > 1
    if several:
        names = [number for number, ranks in enumerate(setting.members) for _ in ranks]
        ranks = [rank for ranks in setting.members for rank in ranks]
        labels = dict(zip(ranks, (f"rank {rank}\nnode {name}" for rank, name in zip(ranks, names))))
    axes.set(xlim=(-0.95, size - 0.05), ylim=(max(rounds, 1) - 0.3, -0.45), ylabel="round")
    axes.set_xticks(range(size), [labels[rank] if several else f"rank {rank}" for rank in range(size)])
    axes.set_yticks([index + 0.18 for index in range(rounds)], range(rounds))
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.spines[:].set_visible(False)


def _arrow(axes: Any, index: int, move: Move, closes: int, label: str) -> None:
    """Draw a message from its sender, at the top of a round, to its receiver, at the bottom.

    One that closes a ring leaves the picture at one side and comes back at the other.
    """
    top, bottom, colour = index, index + 0.52, ADDS if move.adds else COPIES
    style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.4", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 1}
    if closes:
        _round_the_back(axes, move, closes, (top, bottom), style)
    else:
        axes.annotate("", (move.receiver, bottom), (move.sender, top), arrowprops=style, zorder=2)
    axes.text(move.sender, top, label, fontsize=8, ha="center", va="center", color="white", zorder=4,
              bbox={"boxstyle": "round,pad=0.22", "facecolor": colour, "edgecolor": "white", "linewidth": 0.8})


def _round_the_back(axes: Any, move: Move, way: int, ends: tuple[float, float], style: dict[str, Any]) -> None:
    """Draw the two ends of a message that closes a ring, each with the rank at the other end."""
    top, bottom = ends
    middle, style = (top + bottom) / 2, {**style, "linestyle": "--"}
    words = {"fontsize": 7, "color": style["color"], "va": "center"}
    leaves, enters = move.sender + 0.52 * way, move.receiver - 0.46 * way
    axes.annotate("", (leaves, middle), (move.sender, top), arrowprops={**style, "arrowstyle": "-"})
    axes.annotate("", (move.receiver, bottom), (enters, middle), arrowprops=style)
    axes.text(leaves + 0.03 * way, middle, f"to {move.receiver}", ha="left" if way > 0 else "right", **words)
    axes.text(enters - 0.03 * way, middle, f"from {move.sender}", ha="right" if way > 0 else "left", **words)


def _closes(move: Move, around: Sequence[Move], size: int) -> int:
    """Tell whether a message closes a ring: 1 from the last rank to the first, -1 back, 0 not.

    It does where all neighbours send the same way in the same round.
    """
    way = {(size - 1, 0): 1, (0, size - 1): -1}.get((move.sender, move.receiver), 0) if size > 2 else 0
    return way if sum(other.receiver - other.sender == way for other in around) == size - 1 else 0


def space_time(path: str, algorithm: Algorithm, nbytes: int, machine: Machine, ranks: int | None = None,
               dtype: str = "float32") -> None:
    """Draw what a machine does over time: a lane for every rank, its sends above the line, its reductions below.

    A thin line leads from the start of each message at its sender to its end at its receiver.
    Raises ValueError as steps does, and as simulate does.
    """
    plt = _plotter(path)
    setting = setting_for(algorithm, nbytes, machine, machine.ranks if ranks is None else ranks)
    around = [{move.sender: move for move in moves(steps)} for steps in replay(algorithm, setting)]
    _check_messages(sum(map(len, around)))
    estimate = simulate(algorithm, nbytes, machine, dtype=dtype, setting=setting, trace=True)
    lanes = _lanes_of(estimate.messages)
    rows = 1 + max(lanes, default=0)
    figure, axes = plt.subplots(figsize=(12, (0.5 + 0.22 * rows) * setting.size + 1.9), layout="constrained")
    unit, name = _time_unit(estimate.seconds)
    for message, lane in zip(estimate.messages, lanes):
        move = around[message.step][message.sender]
        room = (message.end - message.start) / max(estimate.seconds, 1e-30) * 118        # characters that fit, about
        label = chunk_names(move.chunks, algorithm.chunks(setting))
        label = next((text for text in (f"{label} to {message.receiver}", label) if len(text) + 1 <= room), "")
        _bar(axes, message, (lane, rows), move.adds, unit, label)
    _time_lanes(axes, estimate, unit, name)
    axes.set_title(f"{algorithm.collective.name} by {algorithm.name} of {binary(nbytes)} on {machine.name}, {setting.size} ranks: "
                   f"{seconds(estimate.seconds)}", fontsize=11, loc="left", color=INK)
    kinds = {move.adds for moved in around for move in moved.values()}
    _kinds(figure, kinds, reduces=any(message.over > message.end for message in estimate.messages))
    _save(plt, figure, path)


def _time_lanes(axes: Any, estimate: Estimate, unit: float, name: str) -> None:
    size = len(estimate.idle)
    for rank in range(size):
        axes.axhline(rank, color=LANE, linewidth=1, zorder=1)
    axes.set(xlim=(0, max(estimate.seconds, 1e-30) / unit * 1.005), ylim=(size - 0.5, -0.65), xlabel=f"time ({name})")
    axes.set_yticks(range(size), [f"rank {rank}\nidle {share:.0%}" for rank, share in enumerate(estimate.idle)])
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _lanes_of(messages: Sequence[Message]) -> list[int]:
    """Return a row for every message, so that those of a sender that overlap in time stand above each other."""
    rows: dict[int, list[float]] = {}
    found = []
    for message in messages:
        ends = rows.setdefault(message.sender, [])
        row = next((row for row, end in enumerate(ends) if end <= message.start * (1 + 1e-9)), len(ends))
        ends[row:row + 1] = [message.end]
        found.append(row)
    return found


def _bar(axes: Any, message: Message, place: tuple[int, int], adds: bool, unit: float, label: str) -> None:
    """Draw a message: a bar above its sender's line, a thin line to its receiver, a bar below that one's line for its reduction."""
    colour, (row, rows) = ADDS if adds else COPIES, place
    start, end, over = (time / unit for time in (message.start, message.end, message.over))
    height = 0.42 / rows if rows > 1 else 0.32
    level = message.sender - 0.04 - (row + 0.5) * height
    axes.barh(level, end - start, height, start, color=colour, edgecolor="white", linewidth=0.7, zorder=3)
    axes.plot([start, end], [message.sender, message.receiver], color=colour, linewidth=0.8, alpha=0.5, zorder=2)
    axes.plot([end], [message.receiver], marker="o", markersize=2.5, color=colour, zorder=3)
    if label:
        axes.text((start + end) / 2, level, label, ha="center", va="center", fontsize=7, color="white", zorder=4)
    if over > end:
        axes.barh(message.receiver + 0.16, over - end, 0.2, end, color=INK, edgecolor="white", linewidth=0.5, zorder=3)


def times(path: str, algorithms: Sequence[Algorithm], nbytes: int, machine: Machine, most: int = 64,
          dtype: str = "float32") -> None:
    """Draw the time of several algorithms over the number of ranks, from 2 to `most`, both logarithmic.

    Raises ValueError as steps does, and as simulate does.
    """
    if most < 2:
        raise ValueError(f"{most} ranks: there is nothing to compare below 2")
    plt = _plotter(path)
    counts = [2 ** power for power in range(1, 31) if 2 ** power < most] + [most]
    lines: dict[str, list[float]] = {}
    for algorithm in algorithms:
        _merge(lines, algorithm.name, [simulate(algorithm, nbytes, machine, ranks, dtype=dtype).seconds for ranks in counts])
    figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    for number, (name, values) in enumerate(sorted(lines.items(), key=lambda line: -line[1][-1])):
        axes.plot(counts, values, **_look(number), label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time")
    axes.set_xticks(counts, counts)
    _log_ticks(axes, seconds)
    what = algorithms[0].collective.name if algorithms else ""
    _finish(axes, f"{what} of {binary(nbytes)} on {machine.name}")
    _save(plt, figure, path)


def _merge(lines: dict[str, list[float]], name: str, values: list[float]) -> None:
    """Add a line; one that lies on another, to the eye, shares its name instead of hiding it."""
    for other, there in lines.items():
        if all(abs(one - two) <= 0.005 * two for one, two in zip(values, there)):
            lines[f"{other}, {name}"] = lines.pop(other)
            return
    lines[name] = values


def exposed(path: str, curves: Mapping[str, Sequence[tuple[int, Exposure]]], title: str) -> None:
    """Draw the communication that backward does not hide over the size of the buckets, a line for each name of `curves`.

    Raises ValueError for a path that is neither .svg nor .png, or where matplotlib is missing.
    """
    plt = _plotter(path)
    figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    for number, (name, points) in enumerate(curves.items()):
        sized = [(nbytes, found.exposed) for nbytes, found in points if nbytes]
        found = best([point for point in points if point[0]])
        mark = found, dict(sized)[found]
        look = _look(number)
        axes.plot(*zip(*sized), **look, label=f"{name}\n  best: {binary(mark[0])}, {seconds(mark[1])}")
        axes.plot(*mark, marker="o", markersize=11, fillstyle="none", color=look["color"], markeredgewidth=1.5)
    sizes = sorted({nbytes for points in curves.values() for nbytes, _ in points if nbytes})
    axes.set(xscale="log", xlabel="bucket size", ylabel="time not hidden behind backward")
    if all(found.exposed for points in curves.values() for _, found in points):
        axes.set_yscale("log")
    near = [bool(after) and after < 2 * nbytes for nbytes, after in zip(sizes, [*sizes[1:], 0])]
    axes.set_xticks(sizes, ["" if hidden else binary(nbytes) for nbytes, hidden in zip(sizes, near)], rotation=40, ha="right",
                    rotation_mode="anchor")
    _log_ticks(axes, seconds)
    _finish(axes, title)
    _save(plt, figure, path)


# ---- what they share

def _plotter(path: str) -> Any:
    if not path.endswith((".svg", ".png")):
        raise ValueError(f"{path!r} does not end in .svg or .png")
    try:
        import matplotlib
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'mpiring[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: str) -> None:
    with plt.rc_context({"svg.fonttype": "none"}):
        try:
            figure.savefig(path, dpi=130, facecolor="white")
        except OSError as error:
            raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
        finally:
            plt.close(figure)


def _check_size(algorithm: Algorithm, setting: Setting) -> None:
    """Refuse at once what would take long to refuse."""
    if (steps := int(algorithm.rounds(setting)) * setting.size) > 100 * MOST_MESSAGES:
        raise ValueError(f"a picture of {steps:,} steps cannot be read; fewer ranks can")


def _check_messages(count: int) -> None:
    if count > MOST_MESSAGES:
        raise ValueError(f"a picture of {count:,} messages cannot be read, more than {MOST_MESSAGES:,}: take fewer ranks or pieces")


def _kinds(figure: Any, adds: set[bool], reduces: bool = False) -> None:
    """Add the legend of the kinds of messages that occur."""
    from matplotlib.patches import Patch

    words = {ADDS: "the receiver adds it to its own"} if True in adds else {}
    if False in adds:
        words[COPIES] = "the receiver keeps it as it is"
    if reduces:
        words[INK] = "a rank reduces"
    handles = [Patch(color=colour, label=label) for colour, label in words.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)


def _time_unit(longest: float) -> tuple[float, str]:
    return next(((unit, name) for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")) if longest >= unit), (1e-6, "us"))


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": "os^Dv"[number % 5], "markersize": 4, "linewidth": 1.6}


def _log_ticks(axes: Any, write: Callable[[float], str]) -> None:
    """Label a time axis, if it is logarithmic at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator

    axes.minorticks_off()
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 8 * low else (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter(lambda value, _: write(value))


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11, loc="left", color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))
