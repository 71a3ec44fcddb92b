"""Schedules as data: what each rank sends and receives in every step, with no MPI and no NumPy."""
