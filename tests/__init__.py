"""The test suite. It is a package so that rank bodies have one importable name in every process."""
