"""The ring allreduce by hand: what mpiring.ring_allreduce does, as a plain loop of Sendrecv.

    mpirun -np 4 python examples/ring_by_hand.py

Same chunks, same journeys, same order of summation, so the same bits where the ranks of a node follow one another; but no segments
that travel while others are summed.
Compare the two: mpirun -np 4 python -m mpiring.bench --algorithms ring,examples/ring_by_hand.py:ring_allreduce
"""

import numpy as np
from mpi4py import MPI


def ring_allreduce(buf: np.ndarray, comm: MPI.Comm) -> None:
    """Sum a contiguous 1-D array over all ranks, in place: 2(n-1) steps, each rank sends 2(n-1)/n of the bytes."""
    rank, size = comm.rank, comm.size
    left, right = (rank - 1) % size, (rank + 1) % size
    share, rest = divmod(buf.size, size)            # the first `rest` chunks are one element longer
    edges = [chunk * share + min(chunk, rest) for chunk in range(size + 1)]
    chunks = [buf[start:stop] for start, stop in zip(edges, edges[1:])]
    room = np.empty_like(chunks[0])

    # Reduce-scatter: chunk c goes from rank c+1 round to rank c, and takes every rank's share on the way.
    for back in range(1, size):
        own = chunks[(rank - back - 1) % size]
        incoming = room[:own.size]
        comm.Sendrecv(chunks[(rank - back) % size], dest=right, recvbuf=incoming, source=left)
        np.add(incoming, own, out=own)

    # All-gather: chunk c, whole now, goes from rank c round once more and leaves a copy everywhere.
    for back in range(size - 1):
        comm.Sendrecv(chunks[(rank - back) % size], dest=right, recvbuf=chunks[(rank - back - 1) % size], source=left)


def main() -> None:
    """Sum a vector of ten elements, and show it on every rank."""
    comm = MPI.COMM_WORLD
    vector = np.arange(10.0) + 100 * comm.rank
    ring_allreduce(vector, comm)
    for line in comm.gather(f"rank {comm.rank}: {vector}") or []:
        print(line)


if __name__ == "__main__":
    main()
