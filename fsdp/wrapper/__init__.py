"""The parts of `FullyShardedDataParallel`."""
