"""What the bench's --help says after its options."""

EPILOG = """\
algorithms beside those of `python -m mpiring algorithms`:
  auto          what mpiring chooses; the table says what that was: auto:shared
  shared        ranks of a node reduce in each other's memory
  native        the MPI library's own, called through mpiring
  comm          the same by mpi4py's comm.Allreduce (and so on) without mpiring
  plan          allreduce by a plan made once, with mpiring.allreduce_init
  FILE.py:NAME  yours: a function (buf, comm) that sums in place, or an
                mpiring.Algorithm

columns:
  median, min, p99  microseconds of one call, on the slowest rank
  algbw         GB/s (1e9 bytes): bytes / time
  busbw         GB/s that a link carries: 2(n-1)/n * algbw for allreduce, algbw
                for broadcast and reduce, (n-1)/n * algbw for the others
  xnative       native's median over this one's: above 1 is faster than the MPI
                library. Its geometric mean over all sizes stands at the end
  bound%        with --bound: the bound's median over this one's. In the bound,
                all ranks scale their own array in place at the same time: each
                byte is read once and written once, and no allreduce can do with
                less. (Below some KiB it is the time of a NumPy call)
  #wrong        elements that differ from the exact result

cases of --engine, float32 arrays that are submitted by name and awaited:
  many_small    1,000 arrays of 4 KiB, in another order on every rank
  resnet50      ResNet-50's gradients as backward yields them, against one
                call with as many bytes
  single        one element
  overlap       NumPy at work, a communication of about the same time, and both
                at once
  xallreduce    a column: mpiring.allreduce's median over this one's (one call
                an array; for resnet50 one in all): above 1 is faster
  hidden%       a column: (work + engine - both) / min(work, engine)

cases of --training, float32, SGD with momentum, one thread a rank:
  mlp           25 million weights in 14 tensors, 32 vectors a rank and step
  resnet        ResNet-50's 161 tensors, 16 images of 32 x 32 points
  transformer   8 blocks, 26 million weights in 100 tensors, 4 x 32 tokens
  overhead      161 tensors of 8 weights: what each costs beside its work

subjects of --training; each step is timed in turn, all from the same weights on
the same batches:
  alone         no synchronisation: the time to compute
  mpiring       mpiring.torch's DistributedOptimizer
  bf16          the same with compression to bfloat16
  ddp           PyTorch's DistributedDataParallel over gloo
  horovod       Horovod, where it is installed

columns of --training:
  samples/s     all ranks' samples over the median
  exposed_ms    communication that computing does not hide: the median less the
                median alone
  ofddp%        its share of DDP's
  xddp          DDP's time over this one's, turn by turn; the median of that:
                above 1 is faster
  us/tensor     of overhead: min less min alone, over the tensors (one exchange
                is in it)
  same_weights  in the end all ranks hold the same bits, and what DDP holds but
                for rounding: within 1% of the way that training has moved a
                tensor (or of a tenth of the model's); 25% with bf16

examples:
  mpirun -np 8 python -m mpiring.bench --buffers shared --inplace --bound
  mpirun -np 8 python -m mpiring.bench --engine many_small,resnet50 --inplace
  mpirun -np 2 python -m mpiring.bench --training resnet,overhead
  mpirun -np 4 python -m mpiring.bench -b 1M --algorithms all --plot all.svg

what a call costs beside moving bytes (auto minus comm is mpiring's part):
  mpirun -np 2 python -m mpiring.bench -b 4 -e 4 -n 50 -m 1000 \\
      --algorithms comm,native,auto,plan

exit status: 1 when an element or a weight is wrong, 2 for a wrong command line
or launcher"""
