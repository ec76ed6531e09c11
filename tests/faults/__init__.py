"""Faults on purpose: small trainings in which one rank goes wrong, and what all ranks must say about it.

`fault` has the record and the actions that a rank can be made to do, `job` the training, and `runner` runs and judges.
The table is in the other modules, one for each phase of a training. `python -m tests.faults` runs it.
"""
