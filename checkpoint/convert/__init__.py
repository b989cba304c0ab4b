"""From one format to another."""
