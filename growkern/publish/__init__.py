"""Writes directories and files whole, or not at all."""
