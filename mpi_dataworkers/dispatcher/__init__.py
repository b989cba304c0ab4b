"""The dispatcher: hands steps to data workers as leases. It moves leases, never samples.

`state.py` decides (pure), `server.py` remembers and does the I/O.
"""
