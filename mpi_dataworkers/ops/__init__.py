"""Work on samples and batches; with `loader.py` the only place that imports torch."""
