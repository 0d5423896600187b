"""Training data: from files or a data set to rows of tokens, cached on disk or streamed."""
