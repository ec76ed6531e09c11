"""Ranks that run different operations: `fsdp.cond` and `fsdp.join`."""
