"""GPUs as agents see them: `base.py` is the seam, with three sides.

`cuda.py` is a real GPU. `emulation.py` is none: real processes share one processor core and count their memory, so that
hooks, pages, kills and fallbacks are tested on any machine. `fake.py` is a model under a virtual clock.
"""
