"""Checkpoints in one file, our own format: how they are written, read, and made durable."""
