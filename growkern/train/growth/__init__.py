"""Growth inside a run: when and how, and the models that are made."""
