"""A program whose dataset needs a module that data workers lack: it is there only where the start-up hook is."""

from __future__ import annotations

import needs_hook
import torch
from torch.utils.data import DataLoader

total = torch.zeros(())
for batch in DataLoader(needs_hook.Numbers(), batch_size=4, num_workers=1):
    total += batch.sum()
print("sum", int(total))
