"""Flat parameters, their handles, units, and the runtime that unshards and reshards them."""
