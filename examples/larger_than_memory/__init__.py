"""A model that is larger than the memory which its processes may use."""
