"""Which test process gets which file."""

from __future__ import annotations

from pathlib import Path

from tests.sharing_out import next_file


def test_one_process_boots_slurm_and_the_others_do_the_rest_until_there_is_none(tmp_path: Path) -> None:
    waiting = ["a.py", "b.py", "c.py"]
    for name, text in zip(waiting, ("", "@pytest.mark.slurm", "pytestmark = [pytest.mark.slurm]"), strict=True):
        (tmp_path / name).write_text(text)
    assert next_file(tmp_path, waiting, takes_slurm=True) == "b.py"
    assert next_file(tmp_path, waiting, takes_slurm=False) == "a.py"
    assert next_file(tmp_path, waiting[1:], takes_slurm=False) == "b.py"
    assert next_file(tmp_path, waiting[:1], takes_slurm=True) == "a.py"
