"""A data worker: its processes, and what each does."""
