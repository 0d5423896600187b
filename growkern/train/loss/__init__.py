"""The fused loss around a model: its options, rows and teachers, and losses beside it."""
