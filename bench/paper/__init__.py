"""The tables of bert2BERT and Knowledge Inheritance, at sizes that anyone can run."""
