"""hetstream: training batches from CPU nodes, streamed to the GPUs of a Slurm cluster."""
