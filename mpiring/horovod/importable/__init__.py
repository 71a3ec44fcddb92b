"""A folder for sys.path, with nothing in it but a package of Horovod's name."""
