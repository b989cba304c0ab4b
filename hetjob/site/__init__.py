"""A job's side of the site daemon: where it is, what is said to it, and the thread that says it.

A job without a site daemon, or whose daemon does not answer, runs as if there were none.
"""
