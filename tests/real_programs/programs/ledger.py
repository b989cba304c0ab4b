"""What a training program got: a line of JSON for each step, for the test that compares the lines of two runs.

A line is written at once, so that those of several ranks do not mix.
"""

import hashlib
import json
import os
import random
from collections.abc import Mapping

import numpy as np
import torch


def seed(number):
    """Seed all generators, so that two runs of a program can be compared."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def step(phase, ids, batch):
    """The training loop got a batch: the ids of its samples, in order, and a digest of all its bytes."""
    digest = hashlib.blake2b(digest_size=12)
    _feed(digest, batch)
    _write(phase=phase, ids=torch.as_tensor(ids).tolist(), digest=digest.hexdigest())


def fact(name, value):
    """Something else that is to be the same in every run."""
    _write(fact=name, value=value)


def end():
    """The program is over: the next numbers of its own generators are what they are without hetstream."""
    fact("next random numbers", [random.random(), float(np.random.random()), torch.rand(1).item()])


def _write(**line):
    who = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    os.write(1, (json.dumps({"rank": int(who), **line}) + "\n").encode())


def _feed(digest, value):
    """Add a batch to the digest, with the types of all that it consists of."""
    digest.update(f"<{type(value).__qualname__}".encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _feed_all(digest, (part for pair in value.items() for part in pair))
    elif isinstance(value, (list, tuple)):
        _feed_all(digest, value)
    elif hasattr(value, "__dict__"):
        _feed(digest, vars(value))
    else:
        digest.update(repr(value).encode())
    digest.update(b">")


def _feed_all(digest, parts):
    for part in parts:
        _feed(digest, part)
