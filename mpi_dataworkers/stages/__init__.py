"""Data workers that feed data workers."""
