"""What changes while a run goes on: the size of the model, and the learning rate after that."""
