"""A step of AdamW with factors for every row and column."""
