"""The objectives of a run: the batches that text becomes, and the models of ELECTRA as one."""
