"""Speed of the ops, of growth and of training, beside what else there is."""
