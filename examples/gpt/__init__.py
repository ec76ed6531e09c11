"""The training job of `make train`: `launch` starts `train` on every rank and then `verify`."""
