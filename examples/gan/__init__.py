"""Two sharded models in a single checkpoint: a GAN."""
