"""Ranks that do different things: `fsdp.cond` and `fsdp.join`."""
