"""Classes that travel by value have the names in a data worker that they have in the program."""

from __future__ import annotations

import enum
import pickle
import subprocess
import sys
from pathlib import Path

from hetstream.mpi_dataworkers.ops.pickling import pickle_apart


def test_a_class_within_a_function_keeps_its_whole_name(tmp_path: Path) -> None:
    """PyTorch Geometric's test_dataloader_fallbacks: `default_collate` names the class that it refuses."""

    class Sample:
        class Inner:
            pass

    class Kind(enum.Enum):
        ONE = 1

    classes = (Sample, Sample.Inner, Kind)
    sent = pickle_apart(classes)
    path = tmp_path / "classes"
    path.write_bytes(pickle.dumps((bytes(sent.blob), [bytes(buffer) for buffer in sent.buffers])))
    program = "import pickle, sys; from hetstream.mpi_dataworkers.ops.pickling import unpickle; "
    program += "print(*unpickle(*pickle.load(open(sys.argv[1], 'rb')))[0], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == [repr(each) for each in classes]
