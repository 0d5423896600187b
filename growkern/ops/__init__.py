"""The kernels. They know tensors, never models."""
