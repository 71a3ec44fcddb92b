"""Running schedules: arrays, operations, comms, programs and plans."""
