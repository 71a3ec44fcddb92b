"""Draw time and bus bandwidth over bytes, one line an algorithm. Needs matplotlib (extra 'plot')."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from mpiring.bench.report import Result
from mpiring.bench.subjects import BOUND
from mpiring.units import binary


def draw(path: str, environment: dict[str, Any], results: list[Result]) -> None:
    """Draw results into a file; its ending says which kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = results[0]
    figure, (time, bandwidth) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for marker, name in zip(cycle("os^Dvp*X"), dict.fromkeys(result.algorithm for result in results)):
        mine = [result for result in results if result.algorithm == name]
        sizes = [result.bytes for result in mine]
        label = name.rpartition("/")[2]
        look = {"linestyle": "--", "color": "black"} if name == BOUND else {"marker": marker, "markersize": 4}
        line, = time.plot(sizes, [result.time_us["median"] for result in mine], **look, label=label)
        time.fill_between(sizes, [result.time_us["min"] for result in mine], [result.time_us["p99"] for result in mine],
                          color=line.get_color(), alpha=0.12, linewidth=0)
        bandwidth.plot(sizes, [result.busbw for result in mine], **look, label=label)
    time.set(xscale="log", yscale="log", ylabel="time (us): median, min to p99", title="time")
    bandwidth.set(xscale="log", ylabel="busbw (GB/s)", title="bus bandwidth", ylim=(0, None))
    for axes in (time, bandwidth):
        axes.set_xlabel("bytes of the vector")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: binary(value))
        axes.grid(alpha=0.3)
    time.legend()
    figure.suptitle(f"{first.collective} {first.op} {first.dtype}".replace("  ", " ") + f", {environment['ranks']} ranks on "
                    f"{environment['nodes']} node(s) with {environment['cores']} cores, {environment['library']}", fontsize=11)
    figure.savefig(path, dpi=120)

