"""The checkpoint directory, from the job that has it to the one that goes on in its place."""
