"""What keeps a training run: whole checkpoints, stops by signal, steps that must be finite."""
