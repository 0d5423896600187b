"""A demonstration: trains a small BERT, grows it, and compares ways to train the large one."""
