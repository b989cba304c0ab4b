"""The client programs: one process tree a system, started by the harness with one JSON request.

Each prints one JSON object a case: `{"case": ..., metric: value, ...}`. They import no more than they measure, so that
a peer's client runs in the peer's environment.
"""
