"""python -m mpiring.bench: time the algorithms against each other and against the MPI library's own collectives."""
