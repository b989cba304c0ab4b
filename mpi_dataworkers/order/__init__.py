"""Which samples come at which step, and where a loader stands. Pure."""
