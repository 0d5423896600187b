"""Training on many processes: sharded models, their optimizer state and their checkpoints."""
