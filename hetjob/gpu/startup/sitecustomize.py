"""Runs at the start of a Python process whose PYTHONPATH names this directory; see `hetstream.hetjob.gpu`.

A `sitecustomize` that this one hides is run as if it were not hidden.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(entry or ".") for entry in sys.path]
    # Behind this one alone: one before it has run this one, and would be found again without end.
    behind = sys.path[places.index(here) + 1 :] if here in places else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _NoTorch:
    """Ends an opportunistic program that imports torch without an agent: nobody could tell it to pause."""

    @staticmethod
    def find_spec(name, _path=None, _target=None):  # type: ignore[no-untyped-def]
        if name == "torch":
            raise SystemExit(
                f"hetstream: {sys.executable} has no hetstream, which an opportunistic job needs to share its GPU: "
                "install it in this environment"
            )


def _is_of_another_job() -> bool:
    """As `hetstream.base.process` says, which is not there: an opportunistic job has no components."""
    job, mark = os.environ.get("SLURM_JOB_ID"), os.environ.get("HETSTREAM_GPU_OF_JOB")
    return bool(job) and mark is not None and mark.partition(" ")[0] != job


if os.environ.get("HETSTREAM_GPU"):
    try:
        from hetstream.hetjob.gpu.start import share_when_torch_is_imported
    except ImportError:
        if os.environ.get("HETSTREAM_JOB_CLASS") != "guaranteed" and not _is_of_another_job():
            sys.meta_path.insert(0, _NoTorch)
    else:
        share_when_torch_is_imported()

_run_hidden()
