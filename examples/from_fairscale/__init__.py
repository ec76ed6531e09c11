"""A program that was written for FairScale."""
