"""Every kind of batch arrives as it does from torch's own worker process, in the same run.

Where torch's worker process itself changes a batch (it loses the values of conjugate views, and what it says of a
quantized tensor), ours is as the program's own process makes it. Which batches these are is not listed: all three are
compared.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import wire_cases
from wire_cases import CASES, Batches, Refused, as_it_is
from wire_description import Seen, describe, sharing

from hetstream import DataLoader
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.wire.codec import fuse, size_of, split

# What torch and NumPy say of types that they will have no more, and of types that are new.
pytestmark = pytest.mark.filterwarnings("ignore")

# What of a tensor or an array is not as torch's worker process hands it over, and why it stays so. A program finds none
# of it in values, types, strides, or in what is written where.
REMAINING = {
    "is_shared": "torch's worker puts each storage into a shared file of its own, several system calls for each; data "
    "workers put a batch into memory that is there. Tensors are moved there when they are sent to a process",
    "storage_offset": "as below: what lies before a view is left out, and small tensors lie behind each other",
    "storage.nbytes": "a view is sent as its numbers, without what it is a view of; small tensors of one dtype share a "
    "storage, since one for each costs more than all that is done for them now",
    "storage.resizable": "storages of torch's worker are shared files, and those cannot grow; what data workers send "
    "with gaps is put into usual memory",
}


def from_torch(names: list[str]) -> dict[str, Seen | Refused]:
    loader = torch.utils.data.DataLoader(Batches(names, True), batch_size=None, num_workers=1, collate_fn=as_it_is)
    iterator: Any = iter(loader)
    try:
        return {
            name: batch if isinstance(batch, Refused) else describe(batch)
            for name, batch in zip(names, iterator, strict=True)
        }
    finally:
        iterator._shutdown_workers()


def in_process(name: str) -> Seen:
    return describe(CASES[name]())


def over_the_wire(name: str) -> Seen | Refused:
    try:
        spec, buffers = flatten(CASES[name]())
    except (RuntimeError, TypeError, ValueError) as error:
        return Refused(type(error).__name__, str(error))
    return describe(unflatten(spec, split(*fuse(buffers))))


def difference(ours: Seen, of_torch: Seen, own: Seen) -> str:
    """What is as neither torch's worker process nor the program's own process has it; "" if nothing is."""
    # Of an array of another byte order torch's worker process makes one of this host's.
    if ours.digests != own.digests and (ours.words, ours.digests) != (of_torch.words, of_torch.digests):
        return f"bytes {ours.digests} are not {own.digests}"
    alike = [ours.words == of_torch.words, ours.words == own.words]
    if not any(alike):
        words = list(zip(ours.words, of_torch.words, own.words, strict=False))
        if not len(ours.words) == len(of_torch.words) == len(own.words) or any(a not in (b, c) for a, b, c in words):
            return f"{ours.words}\nis neither {of_torch.words}\nnor {own.words}"
    lost, new = sharing(of_torch.memories) - sharing(ours.memories), sharing(ours.memories) - sharing(own.memories)
    if (lost or new) and not alike[1]:
        return f"memory in common: {lost} is lost, {new} is new"
    # Where arrays and tensors have memory in common, which torch's worker process ends, they lie there as they did.
    if alike[0] and sharing(ours.memories) == sharing(of_torch.memories) and ours.residues != of_torch.residues:
        return f"tensors lie at {ours.residues} modulo 64 and not at {of_torch.residues}"
    arrays = zip(ours.array_residues, of_torch.array_residues, strict=False)
    if alike[0] and any(here % 16 and here != there for here, there in arrays):
        return f"arrays lie at {ours.array_residues} modulo 64 and not at {of_torch.array_residues}"
    return ""


@pytest.mark.shows("batches arrive as from torch's own worker process: types, strides, sharing, gradients")
def test_every_batch_is_as_from_torch_s_worker_process(three: Any) -> None:
    of_torch = from_torch(list(CASES))
    names = [name for name, seen in of_torch.items() if isinstance(seen, Seen)]
    assert len(names) > 4000
    wrong, better = {}, 0
    other_forms: dict[str, str] = {}
    with DataLoader(Batches(names), batch_size=None, collate_fn=as_it_is, service=three.name) as loader:
        for name, batch in zip(names, loader, strict=True):
            ours, own, wanted = describe(batch), in_process(name), of_torch[name]
            assert isinstance(wanted, Seen)
            better += ours.digests == own.digests != wanted.digests
            if found := difference(ours, wanted, own):
                wrong[name] = found
            for here, there in zip(ours.forms, wanted.forms, strict=len(ours.forms) == len(wanted.forms)):
                other_forms |= {form: name for form in here if form in there and here[form] != there[form]}
        assert loader.stats()["local_steps"] < len(names) / 2, "it is the wire that is looked at"
    assert not wrong, f"{len(wrong)} of {len(names)}: " + "\n".join(
        f"{name}: {wrong[name]}"[:2000] for name in list(wrong)[:10]
    )
    assert other_forms.keys() == REMAINING.keys(), other_forms
    assert better > 50, "the cases reach what torch's worker process loses"
    for name, seen in of_torch.items():
        if isinstance(seen, Refused):
            assert over_the_wire(name) in (seen, in_process(name)), name
    for name in ("nothing of autograd", "nothing of autograd inside"):
        with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
            flatten(CASES[name]())


ARRAYS = [name for name in CASES if name.startswith(("array dtype", "array {"))]
ARRAYS += ["kinds of arrays", "maps of files", "texts of arrays"]


def test_over_the_wire_arrays_are_as_torch_sends_them_and_not_as_they_were_made() -> None:
    wrong = {}
    for name in ARRAYS:
        try:
            wanted = describe(pickle.loads(bytes(ForkingPickler.dumps(CASES[name]()))))
        except (RuntimeError, TypeError, ValueError, AttributeError, pickle.PicklingError):
            continue  # torch sends none
        ours = over_the_wire(name)
        assert isinstance(ours, Seen)
        here, there = ([form.get("flags.owndata") for form in seen.forms] for seen in (ours, wanted))
        if (ours.words, ours.digests, here) != (wanted.words, wanted.digests, there):
            wrong[name] = (ours.words, here), (wanted.words, there)
    assert len(ARRAYS) > 700
    assert not wrong, f"{len(wrong)}: {list(wrong.items())[:3]}"


def test_byte_order_strides_and_flags_of_arrays_are_torchs() -> None:
    arrays = [np.full(count, 7, order + kind) for count in (3, 5000) for order in "<>" for kind in ("f4", "i8", "c16")]
    arrays += [np.zeros((0, 3)), np.zeros((3, 0), ">i2"), np.zeros((0, 2, 3)).T]
    spec, buffers = flatten(arrays)
    for ours, torchs in zip(
        unflatten(spec, split(*fuse(buffers))), pickle.loads(bytes(ForkingPickler.dumps(arrays))), strict=True
    ):
        assert (ours.dtype.str, ours.tobytes(), ours.strides) == (torchs.dtype.str, torchs.tobytes(), torchs.strides)
        assert str(ours.flags) == str(torchs.flags)


def sent_bytes(batch: Any) -> int:
    spec, buffers = flatten(batch)
    return len(spec) + sum(map(size_of, buffers))


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda view: view,
    "dataclass": lambda view: wire_cases.Sample(view),
    "subclass": lambda view: view.as_subclass(wire_cases.OwnTensor),
    "reduced": lambda view: [wire_cases.Reduced(view)],
    "leaf": lambda view: view.detach().requires_grad_(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.shows("batches arrive as from torch's own worker process: types, strides, sharing, gradients")
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_a_view_costs_its_numbers_and_never_what_it_is_a_view_of(hold: Callable[[torch.Tensor], Any]) -> None:
    table = torch.arange(10_000_000.0).reshape(-1, 1000)
    for views in (
        list(table[5000:5016]),
        [table[row, ::3] for row in range(16)],
        [table[:, place] for place in range(4)],
    ):
        numbers = sum(view.nbytes for view in views)
        assert numbers <= sent_bytes([hold(view) for view in views]) < numbers + 16_000
    assert sent_bytes([hold(table[:1, :1].expand(1000, 10_000)) for _ in range(16)]) < 16_000
    overlapping = [hold(table[row : row + 100]) for row in range(100)]
    assert sent_bytes(overlapping) < 199 * 4000 + 64_000, "what they have in common once"


def test_a_column_of_a_table_that_is_too_large_comes_without_its_gaps() -> None:
    table = torch.empty(20_000, 4000)  # of which not much is touched
    table[:, 7] = torch.arange(20_000.0)
    spec, buffers = flatten([table[:, 7]])
    frames, places = fuse(buffers)
    (column,) = unflatten(spec, split([bytearray(frame) for frame in frames], places))
    assert torch.equal(column, table[:, 7])
    assert column.untyped_storage().nbytes() == 80_000
