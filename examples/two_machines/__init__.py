"""Two machines, each of which has the whole model, divided among its ranks."""
