"""From memory to disk: the checkpoint writer."""
