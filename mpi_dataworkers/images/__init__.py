"""Photographs as a dataset: `ImageFolder` reads, decodes, crops, resizes and normalises them in one pass."""
