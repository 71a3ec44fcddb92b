"""The commands of `python -m mpiring`: a module each, with `parser()` and `run(options)`, which returns the exit status."""
