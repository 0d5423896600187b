"""The fused loss around a model: its options, the rows of a batch, and one call for any loop."""
