"""The command line, ``python -m fsdp``."""
