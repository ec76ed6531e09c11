"""Recipes for composing fsdp with other techniques, see docs/compositions.md."""
