"""How messages and batches travel. `base.py` is the seam. `zmq.py` carries control messages; `shm.py`, `sockets.py` and
`mpi.py` are transports for batches, `registry.py` lists them, and `choice.py` chooses."""
