"""What a person knows a loader by."""

from __future__ import annotations

import pytest

from hetstream.mpi_dataworkers.loader.client import LoaderName, name_loader, title_of
from hetstream.mpi_dataworkers.process.config import TrainerIdentity


@pytest.mark.parametrize(
    ("is_named", "dataset", "made_at", "title"),
    [
        (False, "torchvision.datasets.folder.ImageFolder", "train.py:38", "ImageFolder train.py:38"),
        (True, "__main__.Pictures", "train.py:38", "resnet Pictures train.py:38"),
        (False, "", "", ""),
    ],
)
def test_a_title(is_named: bool, dataset: str, made_at: str, title: str) -> None:
    identity = TrainerIdentity(0, 1, "resnet", is_named)
    assert title_of(identity, LoaderName(0, 0, "x", made_at, False), {"dataset": dataset}) == title


def test_code_that_a_program_executes_by_itself_has_a_place_too() -> None:
    for names in ({}, {"__name__": None}):
        within = {"name": lambda: name_loader(TrainerIdentity(0, 1, "cells"), {}, False), **names}
        exec("\n\nnamed = name()", within)
        assert within["named"].made_at.startswith("test_naming.py:"), "the lambda above"
