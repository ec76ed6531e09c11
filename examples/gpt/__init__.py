"""The training job of `make train`: `launch` starts `train` on ranks, then `verify`."""
