"""Two-stage training with inheritance: mechanisms first (sub_model, head), the trainer on top."""
