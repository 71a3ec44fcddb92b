"""Price collectives on a machine: python -m mpiring simulate."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import wrap

from mpiring.algorithms.registry import Algorithm
from mpiring.analysis.buckets import ALONE, TimeOf, best, curve, timer
from mpiring.analysis.cost import Estimate, effort, setting_for, simulate
from mpiring.analysis.gradients import Model
from mpiring.analysis.machines import MACHINES, Machine, to_json
from mpiring.commands import options as shared
from mpiring.commands import show
from mpiring.units import binary, count, rate, seconds, size

EPILOG = """A price is what the schedule takes with a latency (alpha) and a time for each byte (beta) on every link, with links
that messages share, and with a time for each byte reduced (gamma). What a call costs the program itself is not in it.
MB is 1000**2 bytes, MiB and M are 1024**2.

A machine of your own is a JSON file; times are in seconds, group is how many ranks a level joins (left out: all):
  {"name": "mine", "ranks": 16, "gamma": 1e-10, "levels": [
    {"name": "node", "group": 4, "alpha": 2e-6, "beta": 1e-10},
    {"name": "network", "alpha": 2e-5, "beta": 1e-9, "ranks_per_port": 4}]}

examples:
  python -m mpiring simulate --machine p3.16xlarge --bytes 160MB
  python -m mpiring simulate --machine ethernet-10g --ranks 64 --bytes 64M --algorithms ring,double_tree
  python -m mpiring simulate --machine dgx-h100 --ranks 64 --bytes 1K,16K,256K,4M,64M
  python -m mpiring simulate --machine ethernet-10g --model resnet50
  python -m mpiring simulate --list"""


PATIENCE = 10
"""Seconds of work for an algorithm that nobody asked for by name."""


def parser() -> shared.Parser:
    """Return the command line."""
    made = shared.Parser("simulate", "Price a collective on a machine and rank the algorithms; or price what a model's "
                         "backward does not hide, for buckets of several sizes. No MPI is started.", EPILOG)
    shared.add_machine(made, needed=False)
    made.add_argument("--bytes", type=shared.many_sizes, metavar="LIST",
                      help="bytes of the vector, such as 160MB or 64M; for several, such as 1K,64K,64M, the fastest")
    made.add_argument("--ranks", type=shared.a_number, metavar="N", help="(default: the machine's)")
    made.add_argument("--per-node", type=shared.a_number, metavar="K", help="ranks on each node (default: the machine's)")
    shared.add_collective(made)
    shared.add_algorithms(made)
    made.add_argument("--dtype", type=shared.a_dtype, default="float32", help="for gamma (default float32)")
    made.add_argument("--model", type=shared.a_model, metavar="NAME",
                      help=f"a model's gradients instead of one vector: {shared.models()}")
    made.add_argument("--list", action="store_true", help="show the ready-made machines, their figures and sources")
    made.add_argument("--export", metavar="FILE.json", help="write --machine as JSON, to be changed and given as --machine")
    shared.add_json(made)
    return made


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for."""
    if options.list:
        every = [json.loads(to_json(machine)) for machine in MACHINES.values()] if options.json else MACHINES.values()
        print(show.as_json(every) if options.json else "\n\n".join(map(_listed, every)))
        return 0
    if options.machine is None:
        raise ValueError(f"--machine is missing; ready-made: {', '.join(MACHINES)}")
    if options.export:
        shared.write(options.export, to_json(shared.on_nodes(options.machine, options.per_node)))
        print(f"wrote {options.export}")
        return 0
    if options.bytes is None and options.model is None:
        raise ValueError("--bytes is missing, or --model")
    if options.model and options.collective != "allreduce":
        raise ValueError("--model is for allreduce")
    machine = shared.on_nodes(options.machine, options.per_node)
    ranks = options.ranks or machine.ranks
    chosen = shared.algorithms(options.algorithms, options.collective)
    print(_buckets(options, machine, ranks, chosen) if options.model else _ranking(options, machine, ranks, chosen))
    return 0


Prices = tuple[list[Estimate], str]
"""Estimates from the fastest on, and what is to be said of algorithms left out, if any is."""


def _priced(options: argparse.Namespace, machine: Machine, ranks: int, chosen: Sequence[Algorithm], nbytes: int) -> Prices:
    """Price the algorithms, telling a terminal what is at work; leave out those that take long and were not named."""
    work = {algorithm: effort(algorithm, setting_for(algorithm, nbytes, machine, ranks)) for algorithm in chosen}
    long = [] if options.algorithms else [algorithm for algorithm in chosen if work[algorithm] > PATIENCE]
    found = []
    for algorithm in chosen:
        if algorithm not in long:
            shared.progress(f"pricing {algorithm.name}")
            found.append(simulate(algorithm, nbytes, machine, ranks, dtype=options.dtype))
    shared.progress("")
    took = seconds(sum(work[algorithm] for algorithm in long))
    left = (f"left out: {', '.join(algorithm.name for algorithm in long)}, which would take about {took} to price; "
            "--algorithms with their names prices them") if long else ""
    return sorted(found, key=lambda estimate: estimate.seconds), left


def _ranking(options: argparse.Namespace, machine: Machine, ranks: int, chosen: Sequence[Algorithm]) -> str:
    """Return the algorithms from the fastest on; for several sizes, the two fastest of each."""
    prices = {nbytes: _priced(options, machine, ranks, chosen, nbytes) for nbytes in options.bytes}
    if options.json:
        records = [{"machine": machine.name, "bytes": nbytes, "ranks": ranks, "collective": options.collective,
                    "dtype": options.dtype, "results": [_record(estimate) for estimate in found]}
                   for nbytes, (found, _) in prices.items()]
        return show.as_json(records[0] if len(records) == 1 else records)
    what = f"{options.dtype}, on {count(ranks, 'rank')}"
    if len(prices) == 1:
        (nbytes, (found, left)), = prices.items()
        heading = f"{options.collective} of {binary(nbytes)}, {what}"
        lines = [heading, *_textbook(options, machine, ranks, nbytes), "", _table(found)]
    else:
        left = max((left for _, left in prices.values()), key=len)
        lines = [f"{options.collective}, {what}", "", _fastest({nbytes: found for nbytes, (found, _) in prices.items()})]
    return "\n".join([show.machine(machine), "", *lines, *(["", *wrap(left, shared.WIDTH)] if left else [])])


def _table(found: Sequence[Estimate]) -> str:
    rows = [(entry.algorithm, seconds(entry.seconds), entry.steps, size(entry.busiest_link_bytes), f"{entry.idle.mean():.0%}",
             _times(entry, found[0])) for entry in found]
    return show.table(("algorithm", "time", "steps", "busiest link", "idle", "x best"), rows)


def _fastest(prices: dict[int, Sequence[Estimate]]) -> str:
    """Return a table of sizes with the two fastest algorithms of each."""
    rows = []
    for nbytes, found in prices.items():
        best, second = (*found, None, None)[:2]
        rows.append((binary(nbytes), best.algorithm if best else "-", seconds(best.seconds) if best else "-",
                     second.algorithm if second else "-", _times(second, best) if second else "-"))
    return show.table(("bytes", "fastest", "time", "second", "x best"), rows, left=(1, 3))


def _times(entry: Estimate, best: Estimate) -> str:
    return f"{entry.seconds / best.seconds:.2f}" if best.seconds else "1.00"


def _textbook(options: argparse.Namespace, machine: Machine, ranks: int, nbytes: int) -> list[str]:
    known = options.collective == "allreduce" and ranks > 1
    return wrap(textbook(machine, ranks, nbytes), shared.WIDTH) if known else []


def textbook(machine: Machine, ranks: int, nbytes: int) -> str:
    """Say what the textbook estimates, and how."""
    here = replace(machine, ranks=ranks, rings=machine.rings_for(ranks))
    beta, took = here.spanning(ranks).beta, here.textbook(nbytes)
    links = round(2 * nbytes * beta / took) if took else 1
    inside = ", and lets every byte cross the outermost level" if here.spanning(ranks) is not here.levels[0] else ""
    return (f"textbook: 2 * {binary(nbytes)} / ({count(links, 'link')} * {rate(beta)}) = {seconds(took)}, which takes (n-1)/n as 1 "
            f"and leaves latency out{inside}")


def _record(estimate: Estimate) -> dict:
    return {"algorithm": estimate.algorithm, "seconds": estimate.seconds, "steps": estimate.steps,
            "busiest_link_bytes": estimate.busiest_link_bytes, "idle": float(estimate.idle.mean())}


def _buckets(options: argparse.Namespace, machine: Machine, ranks: int, chosen: Sequence[Algorithm]) -> str:
    """Return what each size of bucket leaves of the communication."""
    model = options.model
    if not options.algorithms:                           # pipelines are slow to price
        chosen = [algorithm for algorithm in chosen if algorithm.pieces is None]
    time_of = timer(chosen, machine, ranks)
    points = curve(model.gradients, _watched(time_of))
    shared.progress("")
    if options.json:
        return show.as_json({"machine": machine.name, "model": model.name, "ranks": ranks, "algorithms": [a.name for a in chosen],
                             "results": [{"bucket_bytes": bucket, **found._asdict()} for bucket, found in points]})
    found_best = best(points)
    rows = [("alone" if bucket == ALONE else "whole model" if bucket == points[-1][0] else binary(bucket), found.buckets,
             seconds(found.communication), seconds(found.exposed), f"{found.exposed / found.compute:.1%}",
             "<- best" if bucket == found_best else "") for bucket, found in points]
    return "\n".join([show.machine(machine), "", *_about(model, ranks, chosen), "",
                      show.table(("bucket", "buckets", "communication", "exposed", "of backward", ""), rows, left=(0, 5))])


def _about(model: Model, ranks: int, chosen: Sequence[Algorithm]) -> Iterator[str]:
    yield f"{model.name}: {model.about}"
    yield (f"{count(len(model.gradients), 'gradient')}, {size(model.nbytes)} of float32; backward takes {seconds(model.seconds)} "
           f"({model.device}, batch {model.batch})")
    yield from wrap(f"times: {model.source}", shared.WIDTH)
    yield ""
    by = chosen[0].name if len(chosen) == 1 else f"the fastest of {', '.join(algorithm.name for algorithm in chosen)}"
    yield from wrap(f"on {count(ranks, 'rank')}, each bucket by {by}; exposed is what goes on after backward", shared.WIDTH)


def _watched(time_of: TimeOf) -> TimeOf:
    """Return the function, telling a terminal what it is at."""
    def watched(nbytes: int) -> float:
        shared.progress(f"pricing {size(nbytes)}")
        return time_of(nbytes)
    return watched if sys.stderr.isatty() else time_of


def _listed(machine: Machine) -> str:
    """Describe a machine with its sources."""
    lines = [f"{show.machine(machine)}", f"  {count(machine.ranks, 'rank')} where --ranks does not say", "  sources:"]
    for owner, sources in (*((level.name, level.sources) for level in machine.levels), ("machine", machine.sources)):
        for name, text in sources.items():
            lines += wrap(f"{owner}, {name}: {text}", shared.WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return "\n".join(lines)
