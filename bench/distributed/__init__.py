"""Training on several processes: `python -m bench.distributed`."""
