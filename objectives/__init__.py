"""What a measurement is worth: pure functions on plain data. Knows nothing of the tuner, performs no I/O."""
