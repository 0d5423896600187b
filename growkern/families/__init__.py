"""Model knowledge as data: one TOML table per family, read and checked by `spec`."""
