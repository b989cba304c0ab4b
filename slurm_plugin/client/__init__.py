"""Slurm's commands and their output: `run.py` runs them, parsers beside it read what they print."""
