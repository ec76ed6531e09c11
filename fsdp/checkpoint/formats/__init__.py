"""Checkpoints of other libraries, with this library's format as another format."""
