"""What two packages need and must not have twice. It imports nothing of ours, and everything of ours may import it."""
