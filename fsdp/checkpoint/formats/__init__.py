"""Checkpoint formats of multiple libraries, including this library's."""
