"""One rank of a training on Criteo-like batches; rank 0 prints what it measured.

    python -m benchmarks.clients.embedding_train REQUEST

The request names who has the embeddings (`HOLDERS`). Batches are made before, so no loader is in any step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.clients.embedding_models import KAGGLE, Batch, Criteo, model_of, sizes

LR = 0.05
SERVER = "parameter-server"


def initial(num_rows: int, dim: int) -> torch.Tensor:
    """Return the weights that all systems begin with: those of torch's module with this seed."""
    torch.manual_seed(1)
    return 0.1 * torch.empty(num_rows, dim).normal_()


class Holder:
    """Has the embeddings of a training, in one of several ways."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.num_rows, self.dim = sum(sizes(asked["divisor"])), asked["dim"]

    def batches(self, batches: list[Batch]) -> Iterable[Batch]:
        """Go through batches."""
        return batches

    def rows(self, batch: Batch) -> torch.Tensor:
        """Return [samples, 26, dim]."""
        raise NotImplementedError

    def update(self) -> None:
        """Follow `backward`."""

    def measured(self) -> dict[str, float]:
        """Return counters of the steps so far."""
        return {}


class Nobody(Holder):
    """Gives the same rows each time: a step without embeddings."""

    def rows(self, batch: Batch) -> torch.Tensor:
        if not hasattr(self, "same"):
            self.same = torch.randn(*batch.ids.shape, self.dim)
        return self.same.detach().requires_grad_()


class Module(Holder):
    """`torch.nn.EmbeddingBag` and `torch.optim.SGD`; with `dense` gradients, each bit is that of hetstream's."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__(asked)
        sparse = not asked.get("dense")
        self.bag = nn.EmbeddingBag(self.num_rows, self.dim, mode="sum", sparse=sparse, _weight=self.first())
        self.optimizer = torch.optim.SGD(self.bag.parameters(), lr=LR)

    def first(self) -> torch.Tensor:
        return initial(self.num_rows, self.dim)

    def rows(self, batch: Batch) -> torch.Tensor:
        return self.bag(batch.ids.reshape(-1, 1)).view(*batch.ids.shape, self.dim)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Hetstream(Holder):
    """`hetstream.EmbeddingBag`, in the ranks or on the embedding servers of the job."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import hetstream

        super().__init__(asked)
        torch.manual_seed(1)
        own_rows = asked["cache_share"] * self.num_rows / asked["world"]
        self.bag = hetstream.EmbeddingBag(
            self.num_rows,
            self.dim,
            mode="sum",
            optimizer=hetstream.RowSGD(LR),
            cache_bytes=int(own_rows * 4 * self.dim),
            initial=lambda weights: nn.init.normal_(weights).mul_(0.1),
            name="criteo",
        )

    def batches(self, batches: list[Batch]) -> Iterable[Batch]:
        import hetstream

        steps = self.asked["lookahead"]
        if not steps:
            return batches
        given: Iterable[Any] = batches
        if self.asked["lookups_made"]:
            collate = hetstream.with_lookups(lambda batch: batch, self.bag.ids_of(_ids))
            given = [collate(batch) for batch in batches]
        return hetstream.lookahead(given, {self.bag: _ids}, steps=steps)

    def rows(self, batch: Batch) -> torch.Tensor:
        return self.bag(_ids(batch)).view(*batch.ids.shape, self.dim)

    def measured(self) -> dict[str, float]:
        stats = self.bag.stats
        return {
            "wait_ms": 1e3 * stats.wait_s,
            "exchange_ms": 1e3 * stats.exchange_s,
            "looked_up": stats.looked_up,
            "hits": stats.hits,
        }


def _ids(batch: Batch) -> torch.Tensor:
    return batch.ids.reshape(-1, 1)


class Torchrec(Holder):
    """torchrec's row-wise sharded collection with fbgemm's fused update, over gloo."""

    def __init__(self, asked: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchrec
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
            from torchrec.distributed.model_parallel import DistributedModelParallel
            from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
            from torchrec.distributed.types import ShardingEnv, ShardingPlan
        super().__init__(asked)
        self._torchrec = torchrec
        nums = sizes(asked["divisor"])
        self.names = [f"t{index}" for index in range(len(nums))]
        weights = torch.split(initial(self.num_rows, self.dim), nums)
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=num,
                embedding_dim=self.dim,
                feature_names=[name],
                init_fn=partial(self._begin, given),
            )
            for name, num, given in zip(self.names, nums, weights, strict=True)
        ]
        bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            bags,
            {name: row_wise(compute_kernel="fused") for name in self.names},
            sharder=sharder,
            local_size=asked["world"],
            world_size=asked["world"],
            device_type="cpu",
        )
        self.bags = DistributedModelParallel(
            nn.ModuleDict({"bags": bags}),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"bags": plan}),
            sharders=[sharder],
            init_data_parallel=False,
        ).module["bags"]
        firsts = torch.tensor([0, *nums[:-1]]).cumsum(0)
        self._firsts = firsts[:, None]

    def _begin(self, given: torch.Tensor, own: torch.Tensor) -> None:
        """Fill a table, or this rank's rows of it."""
        first = 0 if len(own) == len(given) else self.asked["rank"] * -(-len(given) // self.asked["world"])
        own.data.copy_(given[first : first + len(own)])

    def batches(self, batches: list[Batch]) -> Iterable[Batch]:
        keyed = []
        for batch in batches:
            values = (batch.ids.t() - self._firsts).reshape(-1)
            jagged = self._torchrec.KeyedJaggedTensor(self.names, values, lengths=torch.ones_like(values))
            keyed.append(batch._replace(ids=jagged))
        return keyed

    def rows(self, batch: Batch) -> torch.Tensor:
        return self.bags(batch.ids).wait().values().view(len(batch.labels), len(KAGGLE), self.dim)


class ParameterServer(Holder):
    """A process that has the table, asked by torch's RPC for the rows of each batch; as torch's tutorials have it."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__(asked)
        import torch.distributed.rpc as rpc

        self.rpc = rpc
        self.last: torch.Tensor | None = None

    def rows(self, batch: Batch) -> torch.Tensor:
        self.ids = batch.ids.reshape(-1)
        got = self.rpc.rpc_sync(SERVER, _look_up, (self.ids,))
        self.last = got.requires_grad_()
        return got.view(*batch.ids.shape, self.dim)

    def update(self) -> None:
        assert self.last is not None
        grads = self.last.grad
        self.rpc.rpc_sync(SERVER, _change, (self.ids, grads / self.asked["world"]))


_table: Any = None


def _look_up(ids: torch.Tensor) -> torch.Tensor:
    return _table.index_select(0, ids)


def _change(ids: torch.Tensor, grads: torch.Tensor) -> None:
    _table.index_add_(0, ids, grads, alpha=-LR)


HOLDERS = {
    "nobody": Nobody,
    "module": Module,
    "hetstream": Hetstream,
    "torchrec": Torchrec,
    "rpc": ParameterServer,
}


def moved_bytes() -> tuple[int, int]:
    """Bytes that this host has received and sent; 0 where it has no network of its own."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            numbers = counts.split()
            return int(numbers[0]), int(numbers[8])
    return 0, 0


def queued_s() -> float:
    """How long this thread has been ready and others had its cores, less what this process's other threads took."""
    waited_s = 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return waited_s - (time.process_time() - time.thread_time())


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Train; return what was measured behind the warm-up, and the losses of all steps."""
    rank, world = asked["rank"], asked["world"]
    holder = HOLDERS[asked["holder"]](asked)
    torch.manual_seed(2)
    plain = model_of(asked["model"], asked["dim"], asked["width"], asked["accelerator_ms"])
    model: nn.Module = nn.parallel.DistributedDataParallel(plain) if world > 1 else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    warmup, total = asked["warmup"], asked["warmup"] + asked["steps"]
    size = asked["batch_size"]
    mine = [
        Batch(*(part[rank * size // world : (rank + 1) * size // world] for part in batch))
        # Some more, so that the last steps announce as many as those before.
        for batch in Criteo(asked["divisor"]).batches(asked.get("first", 0), total + asked.get("lookahead", 0), size)
    ]
    losses: list[float] = []
    ends: list[float] = []
    before: dict[str, float] = {}
    moved = 0, 0
    found: dict[str, Any] = {}
    if "load" in asked:
        begun = time.monotonic()
        saved = torch.load(asked["load"])
        holder.bag.load_state_dict(saved["bag"])
        plain.load_state_dict(saved["model"])
        found["load_ms"] = 1e3 * (time.monotonic() - begun)
    batches = holder.batches(mine)
    gc.collect()
    gc.freeze()
    for step, batch in enumerate(batches):
        if step == warmup:
            before, moved = holder.measured(), moved_bytes()
            cpu_s, queued, begun = time.process_time(), queued_s(), time.monotonic()
            if "began" in asked:
                Path(asked["began"]).touch()
        loss = functional.binary_cross_entropy_with_logits(model(batch.dense, holder.rows(batch)), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        holder.update()
        losses.append(loss.item())
        ends.append(time.monotonic())
        if step == asked.get("save_after"):
            torch.save({"bag": holder.bag.state_dict(), "model": plain.state_dict()}, asked["save"])
            found["save_ms"] = 1e3 * (time.monotonic() - ends[-1])
        if step + 1 == total:
            break
    num = asked["steps"]
    after = holder.measured()
    if world > 1:
        mean = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(mean)
        losses = (mean / world).tolist()
    found |= {name: (after[name] - before[name]) / num for name in after}
    if "looked_up" in found:
        found["hits_percent"] = 100 * found["hits"] / max(1.0, found["looked_up"])
    found |= {
        "step_ms": 1e3 * (ends[-1] - begun) / num,
        "own_ms": 1e3 * (ends[-1] - begun - max(0.0, queued_s() - queued)) / num,
        "cpu_ms": 1e3 * (time.process_time() - cpu_s) / num,
        "mb_a_step": max(now - then for now, then in zip(moved_bytes(), moved, strict=True)) / num / 1e6,
        "losses": losses,
        "ends": ends[warmup:],
    }
    return found


def serve_by_rpc(asked: dict[str, Any]) -> None:
    """Be the parameter server until the trainers have ended."""
    global _table
    import torch.distributed.rpc as rpc

    _table = initial(sum(sizes(asked["divisor"])), asked["dim"])
    rpc.init_rpc(SERVER, rank=asked["world"], world_size=asked["world"] + 1, rpc_backend_options=_rpc_options(rpc))
    rpc.shutdown()


def _rpc_options(rpc: Any) -> Any:
    # Over the network: on one machine it would read the other process's memory.
    ways: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
    where = f"tcp://{os.environ['MASTER_ADDR']}:29600"
    return rpc.TensorPipeRpcBackendOptions(init_method=where, rpc_timeout=120, **ways)


def main() -> None:
    """Be the rank, or the server, that the request names."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, world, holder = asked["rank"], asked["world"], asked["holder"]
    if rank == world:
        serve_by_rpc(asked)
        return
    if world > 1 or holder == "torchrec":
        dist.init_process_group("gloo", rank=rank, world_size=world)
    if holder == "rpc":
        import torch.distributed.rpc as rpc

        rpc.init_rpc(f"trainer-{rank}", rank=rank, world_size=world + 1, rpc_backend_options=_rpc_options(rpc))
    found = train(asked)
    if rank == 0:
        print(json.dumps(found), flush=True)
    if holder == "rpc":
        rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
