"""The optimizer of a run and its options."""
