"""Pictures: losses of training runs, attention maps, and the origin of a grown model's units."""
