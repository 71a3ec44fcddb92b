"""Horovod's names for mpiring's PyTorch interface, in programs that are run by `python -m mpiring.horovod`."""
