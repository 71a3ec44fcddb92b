"""Run a program written for Horovod, unchanged: mpirun -np 4 python -m mpiring.horovod train.py ARGUMENTS."""

import sys

from mpiring.horovod import names
from mpiring.run import main

ABOUT = "Runs a Python program that imports horovod.torch on every rank, as python does; horovod.torch is mpiring.torch there."

if __name__ == "__main__":
    names.install()
    sys.exit(main(command="mpiring.horovod", about=ABOUT))
