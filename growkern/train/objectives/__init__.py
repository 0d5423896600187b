"""The objectives of a run: how text becomes batches, and losses beside that of the labels."""
