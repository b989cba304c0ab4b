"""Replicas: each rank's newest generation in the memory of another host, so that a lost node costs no step."""
