"""What users test sharded training with, on one machine and without accelerators."""
