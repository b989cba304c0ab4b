"""The start-up hook: gives torch's DataLoader in an unmodified program the streaming behaviour.

`environment` makes a Python process find `path/sitecustomize.py` at its start; that calls `patch.install`, which
changes two methods of torch's DataLoader when the program imports torch. Without those variables nothing happens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hetstream.base.process import with_job
from hetstream.mpi_dataworkers.process.config import EMBEDDING_SERVERS, hash_seed

_HOOK_DIRECTORY = str(Path(__file__).with_name("path"))


def environment(
    service: str | None,
    environ: Mapping[str, str] = os.environ,
    offload: str | None = None,
    in_process_loaders: bool = False,
    cache: str | None = None,
    embedding_servers: int = 0,
    has_data_workers: bool = True,
) -> dict[str, str]:
    """Variables under which `python train.py` streams, in this job and in no other that is submitted from it.

    Args:
        service: `file:PATH` of the dispatcher's address file, or None for the same batches made in process.
        environ: the environment they are added to; its PYTHONPATH is kept behind the hook.
        offload: what of a model's forward may move to the data workers; None leaves it to the environment.
        in_process_loaders: whether loaders with `num_workers=0` are streamed, too; False leaves it to the environment.
        cache: where fronts of samples are kept, for `parse_cache`; None leaves it to the environment.
        embedding_servers: that the service has from the start, for which trainers wait.
        has_data_workers: whether the service may have some; without, torch's DataLoaders stay what they are.
    """
    of_service = {"HETSTREAM_SERVICE": service or ""}
    if embedding_servers or EMBEDDING_SERVERS in environ:
        of_service[EMBEDDING_SERVERS] = str(embedding_servers)
    if service is not None and not has_data_workers:
        return with_job(of_service, environ)
    inherited = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [_HOOK_DIRECTORY, *(entry for entry in inherited if entry != _HOOK_DIRECTORY)]
    variables = {"HETSTREAM_HOOK": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # Else the order of a set of text, and what samples make of it, would differ between the processes that make them.
    variables |= {} if environ.get("PYTHONHASHSEED") else {"PYTHONHASHSEED": hash_seed(environ)}
    variables |= {} if offload is None else {"HETSTREAM_OFFLOAD": offload}
    variables |= {"HETSTREAM_IN_PROCESS_LOADERS": "1"} if in_process_loaders else {}
    variables |= {} if cache is None else {"HETSTREAM_CACHE": cache}
    # Empty without a service: the environment may have that of a surrounding job.
    return with_job(variables | of_service, environ)
