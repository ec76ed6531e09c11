"""Two sharded models in one checkpoint: a GAN."""
