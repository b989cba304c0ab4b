"""Whether a rank's file can be restored: it is decoded as a restore decodes it. Called by `hetstream ckpt verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetstream.checkpoint.disk.rank_file import RankFile
from hetstream.checkpoint.flash.restore.payload import Payload
from hetstream.checkpoint.flash.restore.stored import TensorStore, owned
from hetstream.checkpoint.record.tree import Foreign, Node
from hetstream.checkpoint.tensors.views import make_foreign


def check_readable(file: RankFile) -> None:
    """Decode all that a restore decodes; its bytes are those that were written, and may say nothing sensible. What was
    pickled is not unpickled: that runs what it says.

    Raises:
        DamagedCheckpoint: it breaks its form.
    """
    make = make_foreign(allow_pickle=False)

    def foreign(tag: str, body: Node, again: Callable[[Node], Any]) -> Any:
        return Foreign(tag, body) if tag == "$pickle" else make(tag, body, lambda node: owned(again(node)))

    file.record.decode(TensorStore(Payload(file.entries, file.data)).stored, foreign)
