"""Whole states of optimizers: made of what ranks keep, and loaded into it."""
