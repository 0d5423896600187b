"""The study that chooses how growth tells copies apart: `python -m bench.symmetry --help`."""
