"""How many data workers a job has while it runs: `snapshot.py` is what is seen and decided, `controller.py` decides."""
