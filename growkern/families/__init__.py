"""Model knowledge as data: one TOML table per family, and the code that reads it."""
