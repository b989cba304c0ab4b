"""Programs that train on a stream, each as its library's users write it: stream_trainings.py NAME FOLDER.

`stream_trainings.py write FOLDER` writes what they read.

Each prints a line for each of its passes: how many batches it had, and a digest of all of them. They know nothing of
hetstream.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

EPOCHS = 3
PROGRAMS: dict[str, Callable[[Path], None]] = {}


def program(function: Callable[[Path], None]) -> Callable[[Path], None]:
    PROGRAMS[function.__name__] = function
    return function


# --- data -------------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, files: int = 6, rows: int = 80) -> None:
    """Rows of text and numbers, as JSON lines and as parquet."""
    import pyarrow as arrow
    from pyarrow import parquet

    for file in range(files):
        table = [
            {"id": number, "text": " ".join(f"w{number * k % 97}" for k in range(number % 7 + 2))}
            for number in range(file * rows, (file + 1) * rows)
        ]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        parquet.write_table(arrow.Table.from_pylist(table), folder / f"{file}.parquet", row_group_size=20)


def write_tars(folder: Path, shards: int = 8, samples: int = 40) -> None:
    """Small pictures with labels, as webdataset's shards."""
    import webdataset
    from PIL import Image

    generator = np.random.default_rng(3)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"pictures-{shard:03}.tar")) as sink:
            for sample in range(samples):
                picture = io.BytesIO()
                Image.fromarray(generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(picture, "png")
                sink.write({"__key__": f"{shard:03}{sample:03}", "png": picture.getvalue(), "cls": str(sample % 5)})


def write_optimised(folder: Path) -> None:
    """LitData's chunks."""
    import litdata

    place = str(folder / "lit")
    litdata.optimize(picture_of, list(range(240)), place, num_workers=1, chunk_size=20, verbose=False)


def picture_of(index: int) -> dict[str, Any]:
    return {"index": index, "pixels": np.random.default_rng(index).integers(0, 256, (3, 8, 8), dtype=np.uint8)}


def write_mosaic(folder: Path) -> None:
    """MosaicML's shards."""
    from streaming import MDSWriter

    columns = {"index": "int", "pixels": "ndarray:uint8:3,8,8"}
    with MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=1 << 13) as out:
        for index in range(240):
            out.write(picture_of(index))


def write_memmap(folder: Path) -> None:
    """Documents of tokens, one after the other, and where each of them ends."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(5, 90, 900)
    generator.integers(1, 5000, int(lengths.sum()), dtype=np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "ends.npy", np.cumsum(lengths))


# --- what all of them do ----------------------------------------------------------------------------------------------


def digest(batch: Any) -> bytes:
    if isinstance(batch, torch.Tensor | np.ndarray):
        array = np.ascontiguousarray(batch)
        return f"{array.dtype}{array.shape}".encode() + array.tobytes()
    if isinstance(batch, dict):
        return b"".join(str(key).encode() + digest(value) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return b"[" + b"".join(map(digest, batch)) + b"]"
    return repr(batch).encode()


def train(batches: Iterable[Any], what: object = "") -> None:
    """One pass. Its line ends with a number that the program itself draws afterwards."""
    seen, number = hashlib.sha256(), 0
    for batch in batches:
        seen.update(digest(batch))
        number += 1
    print(f"rank {os.environ.get('RANK', 0)}", what, number, seen.hexdigest()[:16], torch.rand(1).item(), flush=True)


def first(number: int, batches: Iterable[Any]) -> Iterator[Any]:
    """What a loop that ends at max_steps takes: it asks for no batch more."""
    iterator = iter(batches)
    for _ in range(number):
        yield next(iterator)


def rank() -> tuple[int, int]:
    if "RANK" not in os.environ:
        return 0, 1
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


# --- Hugging Face datasets --------------------------------------------------------------------------------------------


def rows(folder: Path, kind: str = "parquet") -> Any:
    from datasets import load_dataset

    ending = {"parquet": "parquet", "json": "jsonl"}[kind]
    files = sorted(map(str, folder.glob(f"*.{ending}")))
    return load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))


def encode(row: dict[str, Any]) -> dict[str, Any]:
    ids = [int(word[1:]) for word in row["text"].split()][:8]
    noise = random.random() + float(np.random.rand())
    return {"id": row["id"], "input_ids": ids + [0] * (8 - len(ids)), "noise": noise}


@program
def hf_shuffled(folder: Path) -> None:
    dataset = rows(folder).shuffle(seed=7, buffer_size=50).map(encode, remove_columns=["text"]).with_format("torch")
    loader = DataLoader(dataset, batch_size=4, num_workers=3)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        train(loader, epoch)


@program
def hf_kept_workers(folder: Path) -> None:
    dataset = rows(folder, "json").shuffle(seed=7, buffer_size=50).map(encode).with_format("torch")
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True, prefetch_factor=4)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        train(loader, epoch)


@program
def hf_interleaved(folder: Path) -> None:
    from datasets import interleave_datasets

    both = [rows(folder), rows(folder, "json").filter(lambda row: row["id"] % 3 == 0)]
    for strategy in ("first_exhausted", "all_exhausted"):
        dataset = interleave_datasets(both, probabilities=[0.7, 0.3], seed=5, stopping_strategy=strategy)
        dataset = dataset.map(encode, batched=False).select_columns(["id", "input_ids"]).with_format("numpy")
        train(DataLoader(dataset, batch_size=3, num_workers=2, drop_last=True), strategy)


@program
def hf_by_node(folder: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    number, count = rank()
    dataset = split_dataset_by_node(rows(folder).shuffle(seed=1, buffer_size=30), number, count)
    dataset = dataset.map(lambda batch: {"length": [len(text) for text in batch["text"]]}, batched=True, batch_size=16)
    loader = DataLoader(dataset, batch_size=4, num_workers=3)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        train(loader, epoch)


@program
def hf_resumed(folder: Path) -> None:
    """The dataset's own state in the middle of a pass, as a program without workers takes it; the rest with workers."""
    dataset = rows(folder).map(encode).with_format("torch")
    for _, _row in zip(range(100), dataset, strict=False):
        pass
    state = dataset.state_dict()
    dataset = rows(folder).map(encode).with_format("torch")
    dataset.load_state_dict(state)
    for epoch in range(2):
        train(DataLoader(dataset, batch_size=2, num_workers=2), epoch)


@program
def hf_from_map_style(folder: Path) -> None:
    from datasets import Dataset

    dataset = Dataset.from_list([encode({"id": id, "text": f"w{id} w{id * 3}"}) for id in range(400)])
    stream = dataset.to_iterable_dataset(num_shards=8).shuffle(seed=3, buffer_size=64).with_format("torch")
    for epoch in range(2):
        stream.set_epoch(epoch)
        train(DataLoader(stream, batch_size=4, num_workers=2), epoch)


@program
def hf_stateful_loader(folder: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = rows(folder).map(encode).with_format("torch")
    loader = StatefulDataLoader(dataset, batch_size=4, num_workers=2)
    train(first(20, loader), "begun")
    state = loader.state_dict()
    loader = StatefulDataLoader(dataset, batch_size=4, num_workers=2)
    loader.load_state_dict(state)
    train(loader, "resumed")


# --- webdataset -------------------------------------------------------------------------------------------------------


def shards(folder: Path) -> str:
    return str(folder / "pictures-{000..007}.tar")


def augmented(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    picture, label = sample
    return (picture[:, ::-1].copy() if random.random() < 0.5 else picture) + np.float32(np.random.rand()), label


@program
def wds_shuffled(folder: Path) -> None:
    import webdataset as wds

    dataset = (
        wds.WebDataset(shards(folder), shardshuffle=8, detshuffle=True, seed=4)
        .shuffle(40, rng=random)  # torch seeds it in each worker
        .decode("rgb")
        .to_tuple("png", "cls")
        .map(augmented)
        .batched(4)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=4)
    for epoch in range(EPOCHS):
        train(loader, epoch)


@program
def wds_shuffled_by_the_time(folder: Path) -> None:
    """As most programs have it: webdataset seeds its buffer by the process number and the time."""
    import webdataset as wds

    dataset = wds.WebDataset(shards(folder), shardshuffle=False).shuffle(40).decode("rgb").to_tuple("png", "cls")
    for epoch in range(2):
        print("rank 0", epoch, sum(len(labels) for _, labels in DataLoader(dataset, batch_size=4, num_workers=2)))


@program
def wds_kept_workers(folder: Path) -> None:
    import webdataset as wds

    dataset = wds.WebDataset(shards(folder), shardshuffle=8, detshuffle=True).decode("rgb").to_tuple("png", "cls")
    loader = DataLoader(dataset.map(augmented), batch_size=5, num_workers=2, persistent_workers=True)
    for epoch in range(EPOCHS):
        train(loader, epoch)


@program
def wds_resampled(folder: Path) -> None:
    import webdataset as wds

    dataset = wds.DataPipeline(
        wds.ResampledShards(shards(folder), seed=2, deterministic=True),
        wds.tarfile_to_samples(),
        wds.shuffle(30, rng=random.Random(8)),
        wds.decode("rgb"),
        wds.to_tuple("png", "cls"),
        wds.batched(4),
    ).with_epoch(40)
    # As its documents advise: batches are shuffled between workers, and cut anew.
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=3)
    loader = loader.unbatched().shuffle(100, rng=random.Random(9)).batched(6).with_epoch(70)
    for epoch in range(EPOCHS):
        train(loader, epoch)


@program
def wds_pipeline_by_node(folder: Path) -> None:
    import webdataset as wds

    rank()
    dataset = wds.DataPipeline(
        wds.SimpleShardList(shards(folder), seed=1),
        wds.detshuffle(),
        wds.split_by_node,
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.shuffle(20, seed=6),
        wds.decode("torchrgb"),
        wds.to_tuple("png", "cls"),
        wds.batched(3, partial=False),
    )
    for epoch in range(EPOCHS):
        train(wds.WebLoader(dataset, batch_size=None, num_workers=2, pin_memory=False), epoch)


# --- LitData ----------------------------------------------------------------------------------------------------------


@program
def lit_shuffled(folder: Path) -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "lit"), shuffle=True, seed=3)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2)
    for epoch in range(EPOCHS):
        train(loader, epoch)


@program
def lit_in_torchs_loader(folder: Path) -> None:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder / "lit"), shuffle=True)
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        train(loader, epoch)


@program
def lit_resumed(folder: Path) -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    def make() -> Any:
        return StreamingDataLoader(StreamingDataset(str(folder / "lit"), shuffle=True), batch_size=4, num_workers=2)

    loader = make()
    train(first(20, loader), "begun")
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    train(loader, "resumed")
    train(loader, "next")


@program
def lit_combined(folder: Path) -> None:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    parts = [StreamingDataset(str(folder / "lit"), shuffle=shuffle) for shuffle in (True, False)]
    dataset = CombinedStreamingDataset(parts, seed=9, weights=[0.7, 0.3], iterate_over_all=False)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2)
    for epoch in range(2):
        train(loader, epoch)


# --- MosaicML streaming, torchdata ------------------------------------------------------------------------------------


@program
def mosaic_shuffled(folder: Path) -> None:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=4, shuffle_seed=5)
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    for epoch in range(2):
        train(loader, epoch)


@program
def torchdata_nodes(folder: Path) -> None:
    from torchdata.nodes import Batcher, IterableWrapper, Loader, ParallelMapper

    node = ParallelMapper(IterableWrapper(range(400)), picture_of, num_workers=2, method="process")
    train(Loader(Batcher(node, 4)), "nodes")


# --- pretraining ------------------------------------------------------------------------------------------------------


class PackedTokens(IterableDataset[Any]):
    """Sequences of equal length, packed from documents in a new order in each epoch; it never ends."""

    def __init__(self, folder: Path, length: int, number: int, count: int) -> None:
        self.folder, self.length, self.number, self.count = folder, length, number, count

    def documents(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        tokens = np.memmap(self.folder / "tokens.bin", dtype=np.uint16, mode="r")
        ends = np.load(self.folder / "ends.npy", mmap_mode="r")
        epoch = 0
        while True:
            order = np.random.default_rng([42, epoch]).permutation(len(ends))
            for document in order[self.number * workers + worker :: self.count * workers]:
                yield tokens[ends[document - 1] if document else 0 : ends[document]]
            epoch += 1

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        waiting, starts = np.empty(0, np.int64), [0]
        for document in self.documents():
            waiting = np.concatenate([waiting, document.astype(np.int64), [0]])
            starts.append(len(waiting))
            while len(waiting) > self.length:
                packed = torch.from_numpy(waiting[: self.length + 1].copy())
                inside = [start for start in starts if start < self.length]
                ids = torch.zeros(self.length, dtype=torch.int64)
                ids[inside] += 1
                yield {"input_ids": packed[:-1], "labels": packed[1:], "documents": ids.cumsum(0)}
                waiting = waiting[self.length :]
                starts = [start - self.length for start in starts if start >= self.length] or [0]


@program
def packed_pretraining(folder: Path) -> None:
    """Broken off at max_steps, and begun again by a new iterator."""
    loader = DataLoader(PackedTokens(folder, 64, *rank()), batch_size=4, num_workers=2, pin_memory=True)
    for run in range(3):
        train(first(90, loader), run)


@program
def packed_pretraining_kept(folder: Path) -> None:
    loader = DataLoader(PackedTokens(folder, 64, *rank()), batch_size=4, num_workers=2, persistent_workers=True)
    for run in range(2):
        train(first(90, loader), run)


WRITERS = {
    "rows": write_rows,
    "tars": write_tars,
    "optimised": write_optimised,
    "mosaic": write_mosaic,
    "memmap": write_memmap,
}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "write":
        for what in sys.argv[3:] or WRITERS:
            with contextlib.redirect_stdout(sys.stderr):
                WRITERS[what](folder)
        return
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    PROGRAMS[name](folder)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
