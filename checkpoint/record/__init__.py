"""What a saved state is: its tensors, its tree, its name, and the one that all ranks restore. Pure."""
