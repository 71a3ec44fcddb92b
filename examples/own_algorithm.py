"""An algorithm of one's own, proven and run: mpirun -np 4 python examples/own_algorithm.py.

Also: python -m mpiring draw examples/own_algorithm.py:star --ranks 4
"""

from mpiring import IDLE, Algorithm, Step

WHOLE = range(1)            # the vector is one chunk, number 0


def schedule(rank, size):
    """Send all vectors to rank 0, one after the other, and the sum back in the same way.

    A schedule yields one Step for every round; sender and receiver of a message meet in the same one, and others are IDLE.
    """
    for other in range(1, size):
        if rank == 0:
            yield Step(recv_from=other, recv=WHOLE, reduce=True)
        else:
            yield Step(send_to=0, send=WHOLE) if rank == other else IDLE
    for other in range(1, size):
        if rank == 0:
            yield Step(send_to=other, send=WHOLE)
        else:
            yield Step(recv_from=0, recv=WHOLE) if rank == other else IDLE


star = Algorithm("star", "allreduce", schedule)

if __name__ == "__main__":
    import numpy as np
    from mpi4py import MPI

    import mpiring

    vector = np.full(3, float(MPI.COMM_WORLD.rank))
    mpiring.allreduce(vector, algorithm=star)           # proven before it is run; ScheduleError where it is wrong
    if MPI.COMM_WORLD.rank == 0:
        print(mpiring.verify(star, MPI.COMM_WORLD.size))
        print(vector)
