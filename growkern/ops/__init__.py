"""Kernels: they know tensors, never models. One op, one file, one name."""
