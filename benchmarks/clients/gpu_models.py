"""The programs that share a GPU in `benchmarks.gpu_sharing`: models, their batches and losses, in plain torch.

ResNet-50 and VGG-16 are torchvision's (the same layers and numbers of parameters), which is not needed for them. The
graph network has two layers (Kipf and Welling) and takes the whole graph as one batch; its graph is a random one that
is symmetric, so that the gradient needs no other matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CLASSES = 1000


@dataclass(frozen=True)
class Job:
    """What a program trains.

    Attributes:
        model: on its device.
        batch_of: makes a batch of a size.
        loss_of: of the model on a batch.
        size: of a batch, as asked for.
    """

    model: nn.Module
    batch_of: Callable[[int], Any]
    loss_of: Callable[[Any], torch.Tensor]
    size: int


def job_of(request: Mapping[str, Any], device: str) -> Job:
    """The program that a request asks for: `model` (an MLP if it says nothing), and the sizes that it has."""
    return JOBS[request.get("model", "mlp")](request, device)


def _mlp(request: Mapping[str, Any], device: str) -> Job:
    width = request["width"]
    modules = [module for _ in range(request["layers"]) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*modules).to(device)
    return Job(
        model,
        lambda rows: torch.randn(rows, width, device=device),
        lambda batch: model(batch).square().mean(),
        request["rows"],
    )


def _on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    """A model that is made where it will be: to draw a billion numbers on the host takes longer than a run."""
    with torch.device(device):
        return make()


def _images(make: Callable[[], nn.Module]) -> Callable[[Mapping[str, Any], str], Job]:
    def job(request: Mapping[str, Any], device: str) -> Job:
        model, side = _on(device, make), request.get("side", 224)

        def batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            images = torch.randn(size, 3, side, side, device=device)
            return images, torch.randint(_CLASSES, (size,), device=device)

        def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        return Job(model, batch_of, loss_of, request.get("size", 1))

    return job


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, outputs, 1),
        )  # fmt: skip
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Module:
    """ResNet-50 for images of 224 x 224."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(_Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES))


def vgg16() -> nn.Module:
    """VGG-16 without batch normalisation and dropout: with dropout a run's losses would be its own."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, _CLASSES)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


def transformer(width: int, layers: int) -> nn.Module:
    """An encoder; of a width of 2048 and 20 layers it has a billion parameters."""
    made = [
        nn.TransformerEncoderLayer(width, width // 128, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    return nn.Sequential(*made)


def _transformer(request: Mapping[str, Any], device: str) -> Job:
    width, tokens = request["width"], request.get("tokens", 512)
    model = _on(device, lambda: transformer(width, request["layers"]))
    return Job(
        model,
        lambda size: torch.randn(size, tokens, width, device=device),
        lambda batch: model(batch).square().mean(),
        request.get("size", 1),
    )


class _Aggregate(torch.autograd.Function):
    """The product of a symmetric sparse matrix and features."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(matrix)
        return torch.sparse.mm(matrix, features)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        (matrix,) = ctx.saved_tensors
        return None, torch.sparse.mm(matrix, gradients[0].contiguous())


class _GraphNetwork(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, matrix: torch.Tensor, features: torch.Tensor) -> Any:
        hidden = nn.functional.relu(_Aggregate.apply(matrix, self.first(features)))
        return _Aggregate.apply(matrix, self.second(hidden))


def graph_of(nodes: int, degree: int, device: str) -> torch.Tensor:
    """A random symmetric matrix of so many nodes, with about so many neighbours each, normalised by their number."""
    ends = torch.randint(nodes, (2, nodes * degree // 2), device=device)
    both = torch.cat([ends, ends.flip(0)], 1)
    weights = torch.full((both.shape[1],), 1 / degree, device=device)
    return torch.sparse_coo_tensor(both, weights, (nodes, nodes)).coalesce().to_sparse_csr()


def _gcn(request: Mapping[str, Any], device: str) -> Job:
    width, classes = request["width"], request.get("classes", 64)
    model = _on(device, lambda: _GraphNetwork(width, classes))

    def batch_of(nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = torch.randn(nodes, width, device=device)
        return graph_of(nodes, request["degree"], device), features, torch.randint(classes, (nodes,), device=device)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        matrix, features, classes_of = batch
        return nn.functional.cross_entropy(model(matrix, features), classes_of)

    return Job(model, batch_of, loss_of, request["nodes"])


JOBS: Mapping[str, Callable[[Mapping[str, Any], str], Job]] = {
    "mlp": _mlp,
    "resnet50": _images(resnet50),
    "vgg16": _images(vgg16),
    "transformer": _transformer,
    "gcn": _gcn,
}
