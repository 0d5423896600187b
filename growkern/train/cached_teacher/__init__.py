"""Keeps the predictions of a teacher that ran once, so that training need not run it again."""
