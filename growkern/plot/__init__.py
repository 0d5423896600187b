"""Pictures: losses of training runs, attention maps, and where the units of a grown model are from."""
