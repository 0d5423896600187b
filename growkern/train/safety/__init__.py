"""Keeps training runs safe: complete checkpoints, clean stops by signal, only finite steps."""
