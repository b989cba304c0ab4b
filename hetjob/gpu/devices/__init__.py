"""GPUs as agents see them: `base.py` is the seam, and `cuda.py` a real GPU.

`emulation.py` is no GPU: real processes share one processor core and count their memory, so that hooks, pages, kills
and fallbacks are tested on any machine.
"""
