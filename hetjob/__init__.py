"""The job side of hetstream: directives, conversion to a heterogeneous job, the job master, the local backend."""

from __future__ import annotations

if __name__ != "hetstream.hetjob":
    # From the root of a checkout it would be a second copy, whose classes are not those of hetstream.
    raise ImportError(f"no module of this name is hetstream's: import hetstream.hetjob instead of {__name__}")
