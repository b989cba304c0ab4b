"""Kernels of Triton without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Triton's interpreter; Triton decides when a kernel is made who runs it."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
