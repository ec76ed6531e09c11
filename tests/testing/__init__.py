"""Tests of fsdp.testing."""
