"""Teachers known by the k likeliest tokens of each row: a cache, a server, or a file."""
