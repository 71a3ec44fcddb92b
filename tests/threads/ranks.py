"""Ranks as threads of one process, on a comm that is as unkind as MPI may be.

A message moves as late as MPI allows (when its receiver waits for it, after a pause) or, if `eager`, as early: its data are
taken when the send is started, and land as soon as there is a receive for them. A receive spoils its buffer when it is
posted, for from then on MPI may write to it at any time. A program that overwrites what is still being sent, or reads what has
not come yet, gets wrong numbers here every time, not once in a thousand runs.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiring.algorithms.cuts import counts as balanced
from mpiring.algorithms.registry import Algorithm
from mpiring.algorithms.setting import Setting
from mpiring.runtime import ops
from mpiring.runtime.arrays import HOST
from mpiring.runtime.channel import Channel, Waits
from mpiring.runtime.plan import Call, Plan
from mpiring.runtime.program import WINDOW, Memory, compile_program

PATIENCE = 3.0
PAUSE = 0.0005


class Exchange:
    """What is under way among all ranks: for every pair, the sends in order."""

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int], list[Send]] = defaultdict(list)
        self.recvs: dict[tuple[int, int], list[Recv]] = defaultdict(list)

    def land(self, pair: tuple[int, int]) -> None:
        """Move what has been sent and has a receive posted."""
        for recv, send in zip(self.recvs[pair], self.sends[pair]):
            recv.take(send)
        self.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        with self.changed:
            if not self.changed.wait_for(ready, PATIENCE):
                raise TimeoutError(what)


class Send:
    def __init__(self, exchange: Exchange, data: np.ndarray, tag: int):
        self.exchange, self.data, self.tag, self.done = exchange, data, tag, False

    def Wait(self, status: Any = None) -> None:
        self.exchange.wait_for(lambda: self.done, "a send that nobody receives")


class Recv:
    def __init__(self, exchange: Exchange, pair: tuple[int, int], number: int, data: np.ndarray):
        self.exchange, self.pair, self.number, self.data, self.send = exchange, pair, number, data, None
        data[...] = 0xA5

    def take(self, send: Send) -> None:
        if self.send is None:
            self.send, send.done = send, True
            self.data[:send.data.size] = send.data

    def Wait(self, status: Status) -> None:
        sends = self.exchange.sends[self.pair]
        self.exchange.wait_for(lambda: len(sends) > self.number, f"no message {self.number} from {self.pair[0]} to {self.pair[1]}")
        time.sleep(PAUSE)
        with self.exchange.changed:
            self.take(sends[self.number])
            status.tag, status.count = self.send.tag, self.send.data.size
            self.exchange.changed.notify_all()


class Status:
    tag = count = 0


class ThreadComm:
    """The part of mpi4py's Comm that a plan uses."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.rank, self.posted = exchange, rank, defaultdict(int)

    def Isend(self, buffer: tuple, dest: int, tag: int) -> Send:
        data = np.frombuffer(buffer[0], np.uint8, buffer[1])
        send = Send(self.exchange, data.copy() if self.exchange.eager else data, tag)
        with self.exchange.changed:
            self.exchange.sends[self.rank, dest].append(send)
            if self.exchange.eager:
                self.exchange.land((self.rank, dest))
            self.exchange.changed.notify_all()
        return send

    def Irecv(self, buffer: tuple, source: int, tag: int) -> Recv:
        number = self.posted[source]
        self.posted[source] += 1
        with self.exchange.changed:
            recv = Recv(self.exchange, (source, self.rank), number, buffer[0][:buffer[1]])
            self.exchange.recvs[source, self.rank].append(recv)
            if self.exchange.eager:
                self.exchange.land((source, self.rank))
        return recv

    def Sendrecv(self, sendbuf: tuple, dest: int, sendtag: int, recvbuf: tuple, source: int, recvtag: int,
                 status: Status) -> None:
        recv, send = self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)
        recv.Wait(status)
        send.Wait()


class ThreadChannel(Channel):
    """A channel over a ThreadComm."""

    def __init__(self, comm: ThreadComm, rank: int, size: int, segment: int):
        self.comm, self.rank, self.size, self.segment = comm, rank, size, segment
        self.tag_bits, self.broken, self._slots, self.waits = 15, None, {}, Waits()


def run_all(algorithm: Algorithm, inputs: list[np.ndarray], outputs: list[np.ndarray] | None = None, op: Any = MPI.SUM,
            segment: int = 64, eager: bool = False, window: int = WINDOW, **setting: Any) -> list[np.ndarray]:
    """Run an algorithm on one thread a rank; return where the results are (the inputs themselves: in place)."""
    setting = Setting(len(inputs), **setting)
    size, exchange = len(inputs), Exchange(eager)
    results = inputs if outputs is None else outputs
    whole = inputs if algorithm.collective.name != "allgather" else results
    if algorithm.collective.name == "alltoall":
        shares = balanced(inputs[0].size, size) * size
    else:
        shares = balanced(whole[0].size, algorithm.chunks(setting))
    operation = ops.find(op, results[0].dtype)
    failures: list[BaseException] = []

    def rank_program(rank: int) -> None:
        try:
            channel = ThreadChannel(ThreadComm(exchange, rank), rank, size, segment)
            memory = Memory(outputs is None, inputs[rank].flags.c_contiguous, results[rank].flags.c_contiguous)
            length = max(1, segment // results[rank].itemsize)
            program = compile_program(algorithm, rank, setting, shares, length, memory, operation.average, window)
            call = Call(algorithm.collective.name, algorithm.name, whole[rank].size, str(results[rank].dtype), operation.name)
            plan = Plan(channel, call, program, operation, HOST, inputs[rank], results[rank])
            plan.status = Status()
            for j, move in enumerate(plan.moves):
                if move.exchange:
                    plan.moves[j] = move._replace(exchange=(*move.exchange[:-1], plan.status))
            plan()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank_program, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    if failures:
        raise failures[0]
    return results
