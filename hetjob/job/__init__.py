"""A running job seen from within: its directory, its services, its processes, and what is left when it has ended."""
