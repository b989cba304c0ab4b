"""From a script to sbatch: what `hetstream sbatch` submits, and what `hetstream migrate` moves elsewhere."""
