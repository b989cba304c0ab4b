"""Which test process gets which file."""

from __future__ import annotations

from pathlib import Path

from tests.sharing_out import next_file


def test_one_process_boots_slurm_and_the_others_do_the_rest_until_there_is_none(tmp_path: Path) -> None:
    waiting = {"a.py": ["1"], "b.py": ["1"], "c.py": ["1"]}
    for name, text in zip(waiting, ("", "@pytest.mark.slurm", "pytestmark = [pytest.mark.slurm]"), strict=True):
        (tmp_path / name).write_text(text)
    assert next_file(tmp_path, waiting, takes_slurm=True) == "b.py"
    assert next_file(tmp_path, waiting, takes_slurm=False) == "a.py"
    del waiting["a.py"]
    assert next_file(tmp_path, waiting, takes_slurm=False) == "b.py"
    assert next_file(tmp_path, {"a.py": ["1"]}, takes_slurm=True) == "a.py"


def test_files_with_few_tests_come_first(tmp_path: Path) -> None:
    waiting = {"many.py": ["1", "2", "3"], "one.py": ["1"], "two.py": ["1", "2"]}
    for name in waiting:
        (tmp_path / name).write_text("")
    assert next_file(tmp_path, waiting, takes_slurm=False) == "one.py"
