"""Give up a run without hanging anybody: tell the ranks that still wait for this one, and drain what is still on its way here.

Every run sends each peer a stream of messages whose last one is marked. A rank that fails ends its open streams early: with
empty messages marked FAIL, which their receiver cannot take for data, and a report of the cause. The receiver then fails as
well, and so on: where every result depends on every rank, the news reaches all who depend on the missing data, by the very path
that the data would have taken. Afterwards all streams are at their end, nothing is pending and the comm can be used again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiring.errors import MismatchError, PeerError
from mpiring.runtime.program import WINDOW

if TYPE_CHECKING:
    from mpiring.runtime.plan import Plan

LAST, FAIL = 1, 2
"""Bits of a tag: the sender's last message of this run to this receiver; the sender has given up."""

FLAG_BITS = 2

Reports = dict[int, dict[str, Any]]


class Unexpected(Exception):
    """The message that came is not the one due."""

    def __init__(self, tag: int, nbytes: int):
        self.tag, self.nbytes = tag, nbytes


def refuse(plan: Plan, error: BaseException) -> BaseException:
    """Give a run up before it begins: all who run it learn of that."""
    nothing = [None] * len(plan.moves)
    return _GiveUp(plan, 0, [*nothing], [*nothing], error, final=True).run()


def give_up(plan: Plan, at: int, recvs: list, sends: list, error: BaseException) -> BaseException:
    """End the run of a plan that failed in transfer `at`; return the exception to raise.

    `recvs` and `sends` hold for every transfer None (not begun), a request, or False (over).
    """
    interrupted = not isinstance(error, Exception)     # in the middle of an MPI call, perhaps: what has come is not known
    if interrupted or (isinstance(error, MPI.Exception) and error.Get_error_class() != MPI.ERR_TRUNCATE):
        plan.channel.broken = f"{type(error).__name__} in {plan.call}: {error}"
        for request in filter(None, recvs):
            _cancel(request)
        return error
    return _GiveUp(plan, at, recvs, sends, error).run()


def _cancel(request: MPI.Request) -> bool:
    """Cancel a posted receive; tell whether it was still open."""
    status = MPI.Status()
    request.Cancel()
    request.Wait(status)
    return status.Is_cancelled()


class _GiveUp:
    def __init__(self, plan: Plan, at: int, recvs: list, sends: list, error: BaseException, final: bool = False):
        self.plan, self.recvs, self.sends, self.error = plan, recvs, sends, error
        self.comm, self.labels, self.status = plan.channel.comm, plan.channel.labels, MPI.Status()
        self.rank = self.labels[plan.channel.rank]       # as reports and texts have it
        self.open = {transfer.recv_from for transfer, request in zip(plan.transfers, recvs) if request is not False} - {None}
        self.reports: Reports = {self.rank: {"call": str(plan.call)}}
        self.misfit = isinstance(error, (Unexpected, MPI.Exception))
        if self.misfit:
            self._look_at_misfit(at)
        else:
            self.reports[self.rank] |= {"error": f"{type(error).__name__}: {error}", "final": final}

    def _look_at_misfit(self, at: int) -> None:
        """Note what was wrong with the message; if it was the news that its sender gave up, learn why before passing that on."""
        peer, due = self.plan.transfers[at].recv_from, self.plan.moves[at].nbytes
        self.recvs[at] = False
        if isinstance(self.error, Unexpected):
            tag, nbytes = self.error.tag, self.error.nbytes
            saw = f"sent {nbytes} bytes where {due} were due" if nbytes != due else f"sent {due} bytes that belong to another call"
        else:
            tag, saw = self.plan.status.tag, f"sent more than the {due} bytes due"
        if tag & LAST:
            self.open.discard(peer)
        if tag & FAIL:
            self._drain({peer} & self.open)
        else:
            self.reports[self.rank]["saw"] = f"rank {self.labels[peer]} {saw}"

    def run(self) -> BaseException:
        pending = self._tell()
        self._drain(set(self.open))
        for request in [*pending, *filter(None, self.sends)]:
            request.Wait()
        self._withdraw()
        return self._exception()

    def _tell(self) -> list[MPI.Request]:
        """End the streams to the peers that still wait. The empty messages fill the receives that the peer may have posted."""
        waiting = {transfer.send_to for transfer, request in zip(self.plan.transfers, self.sends) if request is None} - {None}
        report, tag, pending = json.dumps(self.reports).encode(), self.plan.signature | FAIL, []
        for peer in sorted(waiting):
            pending += [self.comm.Isend([b"", 0, MPI.BYTE], peer, tag) for _ in range(1 + WINDOW)]
            pending.append(self.comm.Isend([report, len(report), MPI.BYTE], peer, tag | LAST))
        return pending

    def _drain(self, peers: set[int]) -> None:
        """Receive from peers until their streams have ended: into what is posted first, then whatever comes."""
        for j, request in enumerate(self.recvs):
            if request and self.plan.transfers[j].recv_from in peers & self.open:
                self._finish(request)
                self.recvs[j] = False
                if self.status.tag & LAST:
                    self.open.discard(self.plan.transfers[j].recv_from)
        for peer in sorted(peers & self.open):
            tag = 0
            while not tag & LAST:
                message = self.comm.Mprobe(peer, MPI.ANY_TAG, self.status)
                tag, data = self.status.tag, bytearray(self.status.count)
                message.Recv([data, len(data), MPI.BYTE])
                if tag & FAIL and data:
                    self.reports.update({int(rank): report for rank, report in json.loads(bytes(data)).items()
                                         if int(rank) != self.rank})
            self.open.discard(peer)

    def _finish(self, request: MPI.Request) -> None:
        try:
            request.Wait(self.status)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise

    def _withdraw(self) -> None:
        """Cancel the receives for which nothing comes any more."""
        if not all([_cancel(request) for request in self.recvs if request]):
            self.plan.channel.broken = "a message of a later call was lost when ranks disagreed about an earlier one"

    def _exception(self) -> BaseException:
        if not self.misfit:
            return self.error
        head = f"{self.plan.call} on rank {self.rank}"
        failed = [(rank, report["error"]) for rank, report in sorted(self.reports.items()) if "error" in report]
        if failed:
            kind = MismatchError if any(text.startswith("MismatchError:") for _, text in failed) else PeerError
            error = kind(f"{head}: another rank gave up: {'; '.join(f'rank {rank}: {text}' for rank, text in failed)}")
            error.final = any(report.get("final") for report in self.reports.values())
            return error
        lines = [f"rank {rank} saw that {report['saw']}" for rank, report in sorted(self.reports.items()) if "saw" in report]
        lines += [f"rank {rank} called {report['call']}" for rank, report in sorted(self.reports.items())
                  if report["call"] != str(self.plan.call)]
        return MismatchError(f"{head}: ranks disagree: {'; '.join(lines)}")
