"""Benchmarks of the optimizers."""
