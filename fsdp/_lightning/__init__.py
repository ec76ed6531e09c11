"""The parts of `fsdp.lightning`. They use public names of this library only."""
