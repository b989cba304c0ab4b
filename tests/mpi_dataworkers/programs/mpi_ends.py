"""A trainer in an MPI world that ends in one of many ways: `mpi_ends.py END DIRECTORY TRAINERS`.

Its exit handler, made before hetstream is imported as that of a logger is, takes a second and then says so in a file.
"""

import atexit
import os
import sys
import time
from pathlib import Path

RANK = int(os.environ["PMI_RANK"])


@atexit.register
def _write_the_last_lines() -> None:
    time.sleep(1.0)  # so long that it is cut off if the launcher ends this rank
    Path(sys.argv[2], f"handler-of-{RANK}").write_text("ended")


if sys.argv[1] == "closed_by_a_handler_of_before":
    atexit.register(lambda: loader.close())

import torch  # noqa: E402, after the handler

from hetstream import DataLoader  # noqa: E402, after the handler


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((250_000,), float(index)), index * index  # a batch is more than MPI sends ahead


def a_loader() -> DataLoader:
    trainers = int(sys.argv[3])
    return DataLoader(Squares(), batch_size=4, shuffle=True, seed=1, rank=RANK, world_size=trainers, job_name="ends")


def read(loader: DataLoader) -> None:
    for values, squares in loader:
        assert (values[:, 0] ** 2 == squares).all()


def ends_without_close(loader: DataLoader) -> None:
    read(loader)


def closes(loader: DataLoader) -> None:
    read(loader)
    read(loader)
    loader.close()


def closes_within_a_pass(loader: DataLoader) -> None:
    next(iter(loader))
    loader.close()


def leaves_a_pass_open(loader: DataLoader) -> None:
    batches = iter(loader)
    next(batches)
    globals()["kept"] = batches


def reads_nothing(loader: DataLoader) -> None:
    iter(loader)


def makes_a_loader_for_each_pass(loader: DataLoader) -> None:
    loader.close()
    for _ in range(4):
        with a_loader() as another:
            next(iter(another))


def exits_with_a_code(loader: DataLoader) -> None:
    next(iter(loader))
    sys.exit(7)


def closed_by_a_handler(loader: DataLoader) -> None:
    atexit.register(loader.close)
    next(iter(loader))


def closed_by_a_handler_of_before(loader: DataLoader) -> None:
    next(iter(loader))


def finalizes_mpi(loader: DataLoader) -> None:
    from mpi4py import MPI

    next(iter(loader))
    MPI.Finalize()


def raises(loader: DataLoader) -> None:
    next(iter(loader))
    if RANK == 0:
        raise ValueError("of the program")
    while True:  # it would wait for the other rank
        read(loader)


def one_ends_early(loader: DataLoader) -> None:
    if RANK == 0:
        loader.close()
    else:
        closes(loader)


if __name__ == "__main__":
    loader = a_loader()
    globals()[sys.argv[1]](loader)
