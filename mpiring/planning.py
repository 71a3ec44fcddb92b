"""From arguments to a plan: which algorithm it is to be, and what that needs; made once for a comm and its buffers, then kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms import registry
from mpiring.algorithms.registry import COLLECTIVES, Algorithm
from mpiring.algorithms.shared import Work
from mpiring.arguments import Arguments, check_arrays, shares_of
from mpiring.runtime import memory, ops
from mpiring.runtime.arrays import HOST
from mpiring.runtime.channel import Channel, channel_of, check_comm
from mpiring.runtime.messages import message_plan, setting_of
from mpiring.runtime.native import NativePlan, check_native
from mpiring.runtime.plan import Call, Plan
from mpiring.runtime.shared import SharedPlan
from mpiring.select import NATIVE, ON_ONE_NODE, SHARED

AUTO = "auto"
"""The algorithm that the comm's table names."""

LANES = {"allreduce": "ring", "reduce": "reduce_scatter_gather", "broadcast": "scatter_allgather"}
"""What "shared" runs between nodes: each sends the fewest bytes."""


def plan_for(arguments: Arguments, background: bool = False) -> Plan | NativePlan | SharedPlan:
    """Return the plan of a call. If this comm has none yet, check the arguments and make it: nothing is sent before all is checked.

    background: for a run beside the caller, by messages and memory of its own.
    """
    check_comm(arguments.comm)
    _check_algorithm(arguments.algorithm, arguments.collective)
    if not 0 <= arguments.root < arguments.comm.size:
        raise ValueError(f"root {arguments.root} is not one of {arguments.comm.size} ranks")
    check_arrays(arguments)
    shares = shares_of(arguments, arguments.comm.size, arguments.comm.rank)
    operation = ops.find(arguments.op, arguments.recv.dtype) if COLLECTIVES[arguments.collective].reduces else None
    if operation and operation.user and arguments.space is not HOST:
        raise TypeError("op is made with MPI.Op.Create: it is for host memory, not for arrays on a GPU")
    if arguments.algorithm == NATIVE:
        check_native(_call(arguments, NATIVE, operation, shares), operation, arguments.recv.dtype)
    channel = channel_of(arguments.comm)
    if background:
        channel = channel.background
    plan = channel.plans.get(arguments.key)
    if plan is None or plan.gone:
        plan = _make(channel, arguments, operation, shares)
        plan.own = None
        if arguments.collective == "reduce_scatter":
            plan.own = slice(sum(shares[:channel.rank]), sum(shares[:channel.rank + 1]))
        plan.arguments = arguments.op, arguments.algorithm     # keeps what the key knows by id from being another's
        if arguments.space is HOST:
            _know_of_freeing(plan, arguments)
        channel.plans.put(arguments.key, plan)
        channel.made.add(plan)
    return plan


def _know_of_freeing(plan: Any, arguments: Arguments) -> None:
    """Let a plan know when the memory of a shared array that it uses is given back."""
    for array in (arguments.send, arguments.recv):
        if region := memory.find(array.ctypes.data):
            region.users.add(plan)


def _make(channel: Channel, arguments: Arguments, operation: ops.Operation | None, shares: list[int]) -> Any:
    chosen = arguments.algorithm
    if chosen == AUTO:
        chosen = _choose(channel, arguments, operation, shares)
    if chosen == NATIVE:
        call = _call(arguments, NATIVE, operation, shares)
        return NativePlan(channel, call, operation, arguments.space, arguments.send, arguments.recv, shares)
    if chosen == SHARED:
        if problem := _no_sharing(channel, arguments, operation):
            raise ValueError(f"algorithm 'shared' {problem}")
        return _shared_plan(channel, arguments, operation, shares)
    algorithm = chosen if isinstance(chosen, Algorithm) else registry.find(chosen, arguments.collective)
    nbytes = sum(shares) * arguments.recv.dtype.itemsize
    if algorithm is arguments.algorithm:                 # the caller's own: wrong sums in silence would be the alternative
        channel.proof(algorithm, setting_of(channel, algorithm, arguments.root, nbytes))
    if operation and not operation.commutes and not _keeps_order(channel, algorithm, arguments, nbytes):
        raise _no_order(channel, algorithm, arguments, operation, nbytes)
    call = _call(arguments, algorithm.name, operation, shares)
    return message_plan(channel, algorithm, call, operation, arguments.space, arguments.send, arguments.recv, shares)


def _call(arguments: Arguments, name: str, operation: ops.Operation | None, shares: list[int]) -> Call:
    rooted = COLLECTIVES[arguments.collective].rooted
    return Call(arguments.collective, name, sum(shares), str(arguments.recv.dtype), operation.name if operation else "",
                None if len(shares) == 1 else tuple(shares), arguments.root if rooted else None)


def _choose(channel: Channel, arguments: Arguments, operation: ops.Operation | None, shares: list[int]) -> str:
    """Ask the table, with values that are equal on all ranks: how an array is laid out, or where, may differ between them."""
    collective, size = arguments.collective, channel.size
    if size == 1:
        return registry.names(collective)[0]
    count = sum(shares)
    if collective == "alltoall":                         # the longest buffer of a rank
        rows = np.reshape(shares, (size, size))
        count = int(max(rows.sum(0).max(), rows.sum(1).max()))
    kind = "device" if arguments.space is not HOST else "shared" if channel.shares else "ordinary"
    allowed = partial(_allowed, channel, arguments, operation, shares)
    return channel.table.choose(collective, kind, size, len(channel.layout.members), count * arguments.recv.dtype.itemsize, allowed)


def _allowed(channel: Channel, arguments: Arguments, operation: ops.Operation | None, shares: list[int], name: str) -> bool:
    """Tell whether an algorithm gives the result that the others give."""
    if name == NATIVE:
        return _native_can(arguments, operation, shares)
    if name == SHARED:
        return not _no_sharing(channel, arguments, operation)
    if operation is None or operation.commutes:
        return True
    algorithm = registry.find(name, arguments.collective)
    return _keeps_order(channel, algorithm, arguments, sum(shares) * arguments.recv.dtype.itemsize)


def _keeps_order(channel: Channel, algorithm: Algorithm, arguments: Arguments, nbytes: int) -> bool:
    """Tell whether an algorithm, by its proof, reduces in the order of the ranks."""
    return channel.proof(algorithm, setting_of(channel, algorithm, arguments.root, nbytes)).ordered


def _native_can(arguments: Arguments, operation: ops.Operation | None, shares: list[int]) -> bool:
    dtype = arguments.recv.dtype
    if operation and not ops.native_agrees(operation, dtype):
        return False
    try:
        check_native(_call(arguments, NATIVE, operation, shares), operation, dtype)
    except (TypeError, ValueError):
        return False
    return True


def _no_sharing(channel: Channel, arguments: Arguments, operation: ops.Operation | None) -> str:
    """Return why the ranks cannot go through memory that they share, "" if they can."""
    if arguments.space is not HOST:
        return "is for arrays in host memory"
    if channel.spread and arguments.collective in ON_ONE_NODE:
        return f"does {arguments.collective} among the ranks of one node only"
    if channel.spread and operation and not operation.commutes:
        return "reduces in another order than that of the ranks between nodes, and op is not commutative"
    if channel.node is None:
        return "needs memory that ranks of a node share: neither memfd through /proc nor an MPI window works here"
    return ""


def _shared_plan(channel: Channel, arguments: Arguments, operation: ops.Operation | None, shares: list[int]) -> SharedPlan:
    ranks = channel.node.ranks
    root = ranks.index(arguments.root) if arguments.root in ranks else None
    work = Work(arguments.collective, len(ranks), shares, root, channel.layout.lanes if channel.spread else 0)
    call = _call(arguments, SHARED, operation, shares)
    lane = _lane(channel, arguments, operation, call) if channel.spread and channel.lane else None
    return SharedPlan(channel, call, operation, arguments.send, arguments.recv, work, lane)


def _lane(channel: Channel, arguments: Arguments, operation: ops.Operation | None,
          call: Call) -> tuple[Callable[[np.ndarray], Plan], Plan | None]:
    """Return what makes the plan by which a lane reduces a segment in place, and a plan to check that its ranks agree.

    Every segment's call names the whole one, so that ranks which disagree notice it in the first. A mean's sum is divided in the
    end, by the number of all ranks.
    """
    algorithm = registry.find(LANES[arguments.collective], arguments.collective)
    if operation and operation.average:
        operation = ops.find(MPI.SUM, arguments.recv.dtype)
    root = channel.nodes[arguments.root] if COLLECTIVES[arguments.collective].rooted else None

    def make(buffer: np.ndarray, algorithm: Algorithm = algorithm, root: int | None = root) -> Plan:
        part = replace(call, algorithm=f"{algorithm.name} between nodes", count=buffer.size, root=root, whole=str(call))
        return message_plan(channel.lane, algorithm, part, operation, HOST, buffer, buffer, [buffer.size])

    # A root that only sends would not notice that others have given up.
    check = call.collective == "broadcast" and make(np.empty(0, arguments.recv.dtype), registry.find("ring", "allreduce"), None)
    return make, check or None


def _no_order(channel: Channel, algorithm: Algorithm, arguments: Arguments, operation: ops.Operation, nbytes: int) -> ValueError:
    """Return the error for an op that is not commutative, where an algorithm, by its proof, does not keep the order of ranks."""
    others = [registry.find(name, arguments.collective) for name in registry.names(arguments.collective)]
    keep = [other.name for other in others if _keeps_order(channel, other, arguments, nbytes)]
    shared = [] if _no_sharing(channel, arguments, operation) else [SHARED]
    return ValueError(f"op is not commutative, and algorithm {algorithm.name!r} reduces in another order than that of the "
                      f"{channel.size} ranks; use one that keeps it: {', '.join([*keep, *shared, NATIVE])}")


def _check_algorithm(algorithm: str | Algorithm, collective: str) -> None:
    if isinstance(algorithm, Algorithm):
        if algorithm.collective.name != collective:
            raise ValueError(f"algorithm {algorithm.name!r} is one for {algorithm.collective.name}")
    elif not isinstance(algorithm, str):
        raise TypeError(f"algorithm is of type {type(algorithm).__name__}, not a name or an Algorithm")
    elif algorithm not in (known := [*registry.names(collective), SHARED, NATIVE, AUTO]):
        raise ValueError(registry.unknown("algorithm", algorithm, known, f" for {collective}"))
