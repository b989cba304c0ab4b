"""Benchmarks: one file a question, each printing hetstream beside its peers and the physical limit.

`make bench-NAME` runs `python -m benchmarks.NAME`. docs/benchmarks.md says what is measured and how to read it.
Nothing here is installed with the packages.
"""
