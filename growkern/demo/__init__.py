"""A demonstration: trains a small GPT-2, grows it, and compares ways to train the large one."""
