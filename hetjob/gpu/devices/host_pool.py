"""Memory of the host that stands in for a GPU's: pinned, mapped, and given to PyTorch's allocator in advance.

When the allocator may take no more memory of the GPU, it takes free blocks of pools that are made for that
(`MemPool(use_on_oom=True)`, PyTorch 2.8 and later). It never makes such a pool larger, so it is filled once, for the
stream that is current then, and for both sizes of blocks that the allocator keeps apart. Blocks come back to the GPU by
themselves: the next mini-batch asks there first. Managed memory is not used: more of it than there is hangs some GPUs.

Nothing of this runs without a GPU; tests that need one are marked.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hetstream.base.limits import available_bytes

# cuda.h: CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_FLAGS = 0x01 | 0x02
# Tensors up to this have blocks of their own kind. They get so much of the pool.
_SMALL_BYTES = 2**20
_SMALL_PART = 16
# Pinned memory counts in the job's control group, which ends a job that takes too much.
_PART_OF_AVAILABLE = 4


class HostPool:
    """The pool of this process. It lasts as long as the process: tensors may lie in it until its end.

    Args:
        num_bytes: of the host.

    Raises:
        RuntimeError: this PyTorch or the driver cannot do it, or there is not so much memory.
        OSError: there is no driver.
    """

    def __init__(self, num_bytes: int) -> None:
        make: Any = getattr(torch._C, "_cuda_customAllocator", None)
        if make is None:
            raise RuntimeError("this PyTorch takes no allocators")
        driver = ctypes.CDLL("libcuda.so.1")

        def allocate(size: int, _device: int, _stream: int | None) -> int | None:
            address = ctypes.c_void_p()
            failed = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_FLAGS))
            return None if failed else address.value

        def free(address: int | None, _size: int, _stream: int | None) -> None:
            driver.cuMemFreeHost(ctypes.c_void_p(address))

        # As torch.cuda.memory.CUDAPluggableAllocator has them. They must not be collected while the pool is there.
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(free),
        )
        addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        self._allocator = make(*addresses)
        try:
            make_pool: Any = torch.cuda.MemPool
            self._pool = make_pool(self._allocator, use_on_oom=True)
        except TypeError as error:
            raise RuntimeError("the pools of this PyTorch are not used when memory is short") from error
        # Also when Python ends: were the functions gone before the pool, it would give its memory back by nothing.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._fill(min(num_bytes, available_bytes() // _PART_OF_AVAILABLE))
        self.capacity_bytes = sum(segment["total_size"] for segment in self._pool.snapshot())

    def used_bytes(self) -> int:
        """What stands in now."""
        return sum(segment["allocated_size"] for segment in self._pool.snapshot())

    def _fill(self, num_bytes: int) -> None:
        """Have the allocator take the pool's memory, with Python's lock held all the time.

        PyTorch's allocator calls `allocate` while it is locked, and that needs Python's lock. `torch.empty` gives
        Python's lock away for as long: a thread that then drops a tensor has it, and waits for the allocator for ever.
        A storage is made without giving it away. Later nothing of the pool is taken from the host or given back.
        """
        small = num_bytes // _SMALL_PART // _SMALL_BYTES
        storage: Any = torch.UntypedStorage
        # Of the program's own modes none is to see this memory.
        with _disable_current_modes(), torch.cuda.use_mem_pool(self._pool):
            blocks = [storage(_SMALL_BYTES, device="cuda") for _ in range(small)]
            blocks.append(storage(num_bytes - small * _SMALL_BYTES, device="cuda"))
            del blocks
