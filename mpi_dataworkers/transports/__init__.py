"""How messages and batches travel. `base.py` is the seam; `zmq.py` and `shm.py` implement it, `rails.py` chooses."""
