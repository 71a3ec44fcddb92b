"""Plans for the algorithms that send messages: a schedule is compiled for this rank, and bound to the buffers."""

from __future__ import annotations

from typing import Any

from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.runtime import ops
from mpiring.runtime.arrays import Space
from mpiring.runtime.channel import Channel
from mpiring.runtime.plan import Call, Plan
from mpiring.runtime.program import Memory, Program, compile_program, window_of

LATENCY = 64 * 1024
"""Bytes that travel in the time that a message takes before its first byte arrives (alpha / beta): 10 us at 6.5 GB/s on a node,
520 us at 1 Gbit/s. A pipeline's pieces are chosen by it; where it is a factor of two off, that costs a tenth at most.
"""


def message_plan(channel: Channel, algorithm: Algorithm, call: Call, operation: ops.Operation | None, space: Space, send: Any,
                 recv: Any, shares: list[int]) -> Plan:
    """Make the plan of one call; `send` and `recv` are the same array where the result replaces the input."""
    setting = setting_of(channel, algorithm, call.root or 0, sum(shares) * recv.dtype.itemsize)
    memory = Memory(send is recv, send.flags.c_contiguous, recv.flags.c_contiguous, not space.reachable)
    program = _program(channel, algorithm, setting, shares, recv.dtype.itemsize, memory, bool(operation and operation.average))
    return Plan(channel, call, program, operation, space, send, recv)


def setting_of(channel: Channel, algorithm: Algorithm, root: int, nbytes: int) -> Setting:
    """Return what the schedule is made for, from values that are equal on all ranks."""
    pieces = algorithm.pieces(channel.size, nbytes, LATENCY) if algorithm.pieces else 1
    return Setting(channel.size, root, pieces, tuple(channel.nodes))


def _program(channel: Channel, algorithm: Algorithm, setting: Setting, shares: list[int], itemsize: int, memory: Memory,
             average: bool) -> Program:
    """Compile the schedule for this rank, or take it from an earlier call of the same size and layout."""
    if len(shares) == 1:
        shares = balanced(shares[0], algorithm.chunks(setting))
    key = (algorithm, setting, tuple(shares), itemsize, memory, average)
    program = channel.programs.get(key)
    if program is None:
        # On one node a processor moves the bytes, so there is nothing to run ahead of.
        window = window_of(channel.segment) if channel.spread or memory.staged else 0
        program = compile_program(algorithm, channel.rank, setting, shares, channel.segment // itemsize, memory, average, window)
        channel.programs.put(key, program)
    return program
