"""Runs: their files, what these resolve to, and their directories."""
