"""A program that was written for torch's DistributedDataParallel."""
