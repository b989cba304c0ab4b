"""Restores: a record back into the program's own objects."""
