"""Grows models: spaces, plans, and the code that executes plans."""
