"""Evaluation of models: loss on text."""
