"""A program shows the warnings that it would show if nothing were captured of its forward, and each as often."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sample_models as models
import torch
from torch.utils.data import default_collate

from hetstream.mpi_dataworkers.partitioner.capture import quiet
from hetstream.mpi_dataworkers.partitioner.partition import partition

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8}


def warn_of_it(text: str, category: type[Warning] = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=1)


class Drawing(models.Clean):
    """Its graph is another one where an attribute has changed."""

    is_other = False

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values.cosh() if self.is_other else values


def test_a_warning_is_shown_once_also_after_a_forward_was_captured(loaders: Callable[..., Any]) -> None:
    dataset, model = models.Rows(8 * 16), Drawing()
    loader = loaders(dataset)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warnings.filterwarnings("once", "once", UserWarning)
        filters = warnings.filters, list(warnings.filters)
        for number, (values, _) in enumerate(loader):
            if number == 2:
                done = partition(model, default_collate([dataset[0], dataset[1]]), loader=loader, offload="all")
            if number == 8:
                model.is_other = True  # it is traced anew
            for text in ("each line", "once for all"):
                warn_of_it(text)
            warn_of_it("old", DeprecationWarning)
            model(values).sum().backward()
        assert (warnings.filters, list(warnings.filters)) == filters
    assert [str(each.message) for each in shown] == ["each line", "once for all", "old"]
    assert done.counts.checked >= 3, done.reason


@pytest.mark.parametrize("action", ["default", "always", "once", "module", "error"])
def test_what_was_shown_is_remembered_and_what_changes_the_filters_forgets_it(action: Any) -> None:
    def shown(between: Callable[[], None]) -> int:
        """How often a loop of three shows a warning."""
        globals().pop("__warningregistry__", None)
        number = 0
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter(action)
            for _ in range(3):
                try:
                    warn_of_it("again")
                except UserWarning:
                    number += 1
                between()
        return number + len(found)

    def nothing() -> None:
        pass

    def traces() -> None:
        with quiet(), quiet():
            warn_of_it("again")
            with warnings.catch_warnings():
                warn_of_it("of torch's own")
            warnings.filterwarnings("error", "what a library leaves there")

    assert shown(traces) == shown(nothing)

    def changes() -> None:
        traces()
        warnings.filterwarnings(action, "a filter of the program's own")

    assert shown(changes) == 3
