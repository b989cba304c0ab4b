"""Small training programs that preprocess in the forward of a model, for benchmarks and tests of the partitioner.

They know nothing of hetstream, as a user's program does: `python -m benchmarks.partition_programs NAME` trains one, and
prints the losses as exact numbers, one a line.
"""
