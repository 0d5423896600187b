"""Growth: spaces and maps, the plan made of them, and what carries it out."""
