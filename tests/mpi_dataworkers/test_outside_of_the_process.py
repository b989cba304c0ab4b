"""What a program has outside of its process: data workers leave it alone, as torch's worker processes do."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.managers import SharedMemoryManager
from multiprocessing.shared_memory import ShareableList, SharedMemory
from pathlib import Path

HETSTREAM = Path(sys.executable).with_name("hetstream")

SEGMENTS = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import ShareableList, SharedMemory
from torch.utils.data import DataLoader, Dataset

class Named(Dataset):
    def __init__(self, name, words): self.name, self.words, self.held = name, words, None
    def __len__(self): return 8
    def __getitem__(self, index):
        if self.held is None:
            self.held = SharedMemory(self.name), ShareableList(name=self.words)
        own = SharedMemory(create=True, size=8)
        other = SharedMemory(own.name)
        if index % 2:
            own, other = other, own
        own.close()
        other.close()
        other.unlink()
        return self.held[0].buf[index] + len(self.held[1][0])

resource_tracker.ensure_running()  # torch's worker processes share it, as they do where the program made the segments
for epoch in range(2):
    print([batch.tolist() for batch in DataLoader(Named(*sys.argv[1:]), 4, num_workers=2)])
for name in sys.argv[1:]:
    resource_tracker.register("/" + name, "shared_memory")
    resource_tracker.unregister("/" + name, "shared_memory")
"""


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(HETSTREAM), "run", "--data-workers", "1", "--", sys.executable, "train.py", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)


def test_a_segment_that_samples_attach_to_stays_the_programs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEGMENTS)
    with SharedMemoryManager() as manager:
        segment, text = manager.SharedMemory(8), manager.ShareableList(["abc"])
        segment.buf[:8] = bytes(range(8))
        done = run(tmp_path, segment.name, text.shm.name)  # until what unlinks, which holds stderr, has ended, too
        assert done.stdout == "[[3, 4, 5, 6], [7, 8, 9, 10]]\n" * 2, done.stderr
        assert done.returncode == 0
        assert "local" not in done.stderr
        assert "resource_tracker" not in done.stderr
        SharedMemory(segment.name).close()
        ShareableList(name=text.shm.name).shm.close()
