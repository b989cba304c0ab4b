"""Saves: a state taken apart, and copied into a slot."""
