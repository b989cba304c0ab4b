"""When to save and what to keep: pure decisions, each with its reason. They read no clock, no file and no torch."""
