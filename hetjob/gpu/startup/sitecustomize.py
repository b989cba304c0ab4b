"""Runs at the start of a Python process whose PYTHONPATH names this directory; see `hetstream.hetjob.gpu`.

A `sitecustomize` that this one hides is run as if it were not hidden.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("HETSTREAM_GPU"):
    from hetstream.hetjob.gpu.start import share_when_torch_is_imported

    share_when_torch_is_imported()

_run_hidden()
