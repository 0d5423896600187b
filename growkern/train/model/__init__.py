"""Language models: loading, output projections, sub-models, and FLOPs."""
