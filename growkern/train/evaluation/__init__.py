"""Evaluation of models: loss on text, and accuracy after fine-tuning."""
