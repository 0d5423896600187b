"""Trains grown models: in two stages, with the original model as a teacher if wanted."""
