"""The loader: what the training program iterates. See `data_loader.py`; `unmodified.py` serves torch's own class."""
