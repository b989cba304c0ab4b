"""Work on samples and batches; with `loader/` the only place that imports torch."""
