"""Random growths that check the words of plans; `__main__` says how to run them."""
