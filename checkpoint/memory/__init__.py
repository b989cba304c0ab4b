"""Generations in shared memory: stores, their slots, and who has them."""
