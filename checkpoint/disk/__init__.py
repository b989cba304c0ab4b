"""Checkpoints on disk: directories, who writes to them, parts and their commit."""
