"""What Horovod's interfaces share, as far as programs import it."""
