"""The tests share these modules: the harness of ranks, models, twins to compare with, and files to read."""
