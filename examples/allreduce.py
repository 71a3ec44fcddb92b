"""The calls: mpirun -np 4 python examples/allreduce.py."""

import numpy as np
from mpi4py import MPI

import mpiring

comm = MPI.COMM_WORLD
say = print if comm.rank == 0 else lambda *_: None

vector = np.full(8, comm.rank + 1.0)
mpiring.ring_allreduce(vector)                                          # the sum takes the vector's place
say("sum     ", vector)

vector = np.full(8, comm.rank + 1.0)
say("average ", mpiring.ring_allreduce(vector, op=mpiring.AVERAGE))     # the array with the result is returned, too

largest = np.empty(8)
mpiring.allreduce(np.arange(8.0) * (comm.rank + 1), largest, op=MPI.MAX, algorithm="tree")
say("largest ", largest)

vector = np.arange(8.0)
chunk = mpiring.reduce_scatter(vector)                                  # a view of this rank's chunk: all sums are in some chunk
chunk /= comm.size
mpiring.allgather(vector)                                               # and now all of them are on every rank
say("gathered", vector)

settings = np.arange(3.0) if comm.rank == 0 else np.empty(3)
mpiring.broadcast(settings)                                             # rank 0's, on all ranks
total = mpiring.reduce(settings * comm.rank)                            # on rank 0 only; None on the others
say("reduced ", total)

blocks = np.full(comm.size, float(comm.rank))                           # one element for each rank
say("blocks  ", mpiring.alltoall(blocks))
