"""The teacher that ran once: its cache on disk, and the teacher that reads it."""
