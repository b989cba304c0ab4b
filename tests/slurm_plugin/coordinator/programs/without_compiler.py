"""Keeps torch's compiler out of a program that compiles nothing: optimizers import it, which takes as long as torch.

What optimizers call of it does nothing where nothing is compiled.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

_compiler: Any = ModuleType("torch._dynamo")
_compiler.disable = lambda function, *_, **__: function
_compiler.graph_break = lambda: None
sys.modules["torch._dynamo"] = _compiler
