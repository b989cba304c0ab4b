"""Runs at the start of a Python process whose PYTHONPATH names this directory; see `hetstream.mpi_dataworkers.hook`.

Must never stop a program: where hetstream is not installed it says so once and lets the program run locally. A
`sitecustomize` that this one hides is run as if it were not hidden.
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


def _install_command() -> str:
    """By the file itself: hetstream cannot be imported here."""
    parts = (os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "base", "installed.py")
    spec = importlib.util.spec_from_file_location("_hetstream_installed", os.path.normpath(os.path.join(*parts)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.install_command(python=sys.executable))


if os.environ.get("HETSTREAM_HOOK") == "1":
    try:
        from hetstream.mpi_dataworkers.hook.patch import install
    except ImportError:
        if importlib.util.find_spec("torch") is not None:
            print(
                f"hetstream: not installed for {sys.executable}; its DataLoaders stay local. "
                f"Install it there: {_install_command()}",
                file=sys.stderr,
            )
    else:
        install()

_run_hidden()
