"""The version, in the one place that setup.py reads as text and `fsdp` exports."""

__version__ = "0.1.0"
