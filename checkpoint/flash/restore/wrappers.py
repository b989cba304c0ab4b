"""What to do where a model was saved wrapped and is restored plain, or the other way round. Pure.

DistributedDataParallel and torch.compile put a model into a module of their own, and its name into all names: an
evaluation program that has only the model then finds nothing where it looks.
"""

from __future__ import annotations

from collections.abc import Collection

# What the attribute is called by which a wrapper has its model.
_WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile"}


def advice(missing: Collection[str], unexpected: Collection[str]) -> str:
    """What to do about names that differ by a wrapper's alone; "" if they do not.

    Args:
        missing: names of the program's state that the checkpoint lacks.
        unexpected: names of the checkpoint that the program's state lacks.
    """
    for word, wrapper in _WRAPPERS.items():
        if _unwrapped(unexpected, word) & {*missing}:
            return (
                f". The model was saved within {wrapper}: wrap it here too before it is restored, or save what is "
                f"within (model.{word})"
            )
        if _unwrapped(missing, word) & {*unexpected}:
            return f". The model is within {wrapper} here, and was saved without: restore what is within (model.{word})"
    return ""


def _unwrapped(names: Collection[str], word: str) -> set[str]:
    return {name.replace(f".{word}.", ".", 1) for name in names if f".{word}." in name}
