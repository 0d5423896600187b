"""The training loop around a step: its optimizer, its callback and its numbers."""
