"""Adapters on a sharded transformers model, trained by transformers' Trainer."""
