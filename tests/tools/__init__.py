"""These programs are run by hand: some record test data with FairScale itself, some kill what trains."""
