"""The fused losses: labels, and teachers by their logits or their likeliest tokens."""
