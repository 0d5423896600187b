"""Any PyTorch module, widened."""
