"""What a cluster's state says: who waits for what, what is stranded, what would help. Decisions are pure."""
