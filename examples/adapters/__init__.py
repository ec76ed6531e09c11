"""Adapters on a frozen, sharded transformers model."""
