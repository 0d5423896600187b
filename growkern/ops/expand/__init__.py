"""The op `expand`: gathers and rescales the entries of a weight."""
