"""The keyword `features`: what it may be, and its parts; graphs are loaded only where a loader has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hetstream.base.errors import OptionsError

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.loader.feature_parts import FeatureParts


def features_or_none(_: str, value: Any) -> Iterator[str]:
    """A feature graph, one that is cut, or one whose cut follows the steps; or None."""
    if value is not None:
        from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
        from hetstream.mpi_dataworkers.features.graph import FeatureGraph
        from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures

        if not isinstance(value, FeatureGraph | CutGraph | HybridFeatures):
            yield (
                f"features={value!r}: must be a FeatureGraph, a CutGraph such as decide(...).cut, HybridFeatures, or "
                "None; a function of a batch is given as batch_stage"
            )


def checked_features(value: Any) -> Any:
    """The features.

    Raises:
        OptionsError: they are none.
    """
    if value is None or any(features_or_none("features", value)):
        raise OptionsError(
            f"set_features: features={value!r}: must be a FeatureGraph, a CutGraph such as decide(...).cut, or "
            "HybridFeatures"
        )
    return value


def feature_parts(features: Any, device: torch.device, missing: str) -> FeatureParts:
    """The parts of a loader's graph; see `FeatureParts`."""
    from hetstream.mpi_dataworkers.loader.feature_parts import FeatureParts

    return FeatureParts(features, device, missing)
