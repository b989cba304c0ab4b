"""What hetstream is installed from: the wheel, the RPM spec, the easyconfig, and the command wherever they put it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.slurm_plugin.cli.completion import SHELLS, man_pages
from hetstream.slurm_plugin.submit import program
from tests.programs import needs

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "slurm_plugin" / "packaging"
SYSTEM_PYTHON = Path("/usr/bin/python3").resolve()
LMOD = Path("/usr/share/lmod/lmod/init/bash")
QUICK_START = """
import torch
from torch.utils.data import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([index, index**2])

if __name__ == "__main__":
    seen = [pair for batch in DataLoader(Squares(), batch_size=8, num_workers=2) for pair in batch.tolist()]
    print("right" if seen == [[k, k * k] for k in range(64)] else seen)
"""


def run(*argv: object, env: dict[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 300) -> str:
    """Run a command and return its output; a failure fails the test with all that was said."""
    done = subprocess.run(
        [str(word) for word in argv], env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*paths: str) -> list[str]:
    """The files of the checkout below these paths."""
    return run("git", "ls-files", *paths, cwd=ROOT).split()


def fake_wheel(directory: Path, name: str, version: str) -> None:
    """A wheel as far as the recipes look into it."""
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        told = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nSummary: what {name} does\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", told)


def test_recipes_name_what_lies_beside_them(tmp_path: Path) -> None:
    fake_wheel(tmp_path, "hetstream", "7.8.9")
    fake_wheel(tmp_path, "xxhash", "4.1.0")
    said = run(sys.executable, PACKAGING / "recipes.py", tmp_path, "/usr/bin/env")
    spec, easyconfig = (Path(line) for line in said.split())
    assert (spec.name, easyconfig.name) == ("hetstream.spec", "hetstream-7.8.9.eb")
    text = spec.read_text()
    assert "\nVersion: 7.8.9\n" in text
    assert "\nSource0: xxhash-4.1.0-py3-none-any.whl\nSource1: hetstream-7.8.9-py3-none-any.whl\n" in text
    assert "%{SOURCE0} %{SOURCE1}\n" in text
    digests = re.findall(r"^    '([0-9a-f]{64})',$", easyconfig.read_text(), re.M)
    wheels = (tmp_path / name for name in re.findall(r"^    '(.*\.whl)',$", easyconfig.read_text(), re.M))
    assert digests == [run("sha256sum", wheel).split()[0] for wheel in wheels]
    assert len(digests) == 2
    assert "version = '7.8.9'" in easyconfig.read_text()


@pytest.mark.parametrize(
    ("names", "python", "text"),
    [
        (("xxhash",), "/usr/bin/env", "holds no wheel of hetstream: make packages"),
        (("hetstream",), "/root/python3", "is in a home directory: name an interpreter of the system"),
    ],
)
def test_recipes_that_nobody_could_use_are_not_made(
    tmp_path: Path, names: tuple[str, ...], python: str, text: str
) -> None:
    for name in names:
        fake_wheel(tmp_path, name, "1.0")
    argv = [sys.executable, PACKAGING / "recipes.py", tmp_path, python]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, text in done.stdout) == (1, True), done
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("way", ["beside the interpreter", "elsewhere", "nowhere"])
def test_the_command_is_found_where_pip_has_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """`pip install --user` and `--prefix`, as with a Python of an environment module, put it elsewhere."""
    system, site = tmp_path / "usr/bin", tmp_path / "home/lib/python3/site-packages"
    metadata = site / "hetstream-7.8.9.dist-info"
    for directory in (system, metadata, tmp_path / "home/bin"):
        directory.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: hetstream\nVersion: 7.8.9\n")
    (metadata / "RECORD").write_text("../../../bin/hetstream,,\n../../../bin/hetstreamd,,\n")
    places = {"beside the interpreter": system, "elsewhere": tmp_path / "home/bin"}
    for place in {places[way]} if way in places else ():
        (place / "hetstream").touch()
    monkeypatch.setattr(sys, "executable", str(system / "python3"))
    monkeypatch.syspath_prepend(site)
    if way == "nowhere":
        with pytest.raises(program.ProgramNotFound, match="hetstream does not exist"):
            program.own_program()
    else:
        assert program.own_program() == (str(places[way] / "hetstream"),)


def test_what_a_package_places_lies_below_another_root(tmp_path: Path) -> None:
    hetstream = Path(sys.executable).with_name("hetstream")
    told = run(hetstream, "site", "install", "--prefix", "/usr", "--destdir", tmp_path, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert run(hetstream, "site", "install", "--prefix", "/usr", "--destdir", tmp_path) == told.replace("would ", "")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {f"etc/hetstream/{name}" for name in ("policy.lua", "daemon.env", "exporter.env", "packing.env")} < files
    assert {"usr/share/hetstream/lua/cli_filter.lua", "usr/share/man/man1/hetstream.1"} < files
    assert not [name for name in files if name.startswith("usr/etc") or name.endswith("install.json")]
    unit = (tmp_path / "usr/lib/systemd/system/hetstreamd.service").read_text()
    assert "\nEnvironmentFile=-/etc/hetstream/daemon.env\n" in unit
    assert f'\nExecStart="{hetstream}" site daemon ' in unit
    assert str(tmp_path) not in "".join((tmp_path / name).read_text() for name in files)


@pytest.fixture(scope="module")
def dist() -> Iterator[Path]:
    """What `make packages` makes, for the system's Python."""
    if not SYSTEM_PYTHON.exists():
        pytest.skip(f"{SYSTEM_PYTHON} does not exist")
    with tempfile.TemporaryDirectory(prefix="hetstream-packages-") as directory:
        out = Path(directory) / "dist"
        pip = Path(sys.executable).with_name("pip")
        run(pip, "--python", SYSTEM_PYTHON, "wheel", "-q", "--disable-pip-version-check", "-w", out, ROOT)
        run(sys.executable, PACKAGING / "recipes.py", out, SYSTEM_PYTHON)
        yield out


def wheel_in(dist: Path) -> Path:
    """hetstream's own wheel, whose name has the version that git gave it."""
    (wheel,) = dist.glob("hetstream-*.whl")
    return wheel


def version_of(dist: Path) -> str:
    return wheel_in(dist).name.split("-")[1]


@pytest.mark.shows("a wheel, an RPM and an EasyBuild module have every file that runs")
@pytest.mark.slow
def test_the_wheel_holds_every_file(dist: Path) -> None:
    with zipfile.ZipFile(wheel_in(dist)) as archive:
        names = set(archive.namelist())
    share = f"hetstream-{version_of(dist)}.data/data/share/"
    data = share + "hetstream/templates/"
    folders = ("slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint")
    ours = {f"hetstream/{name}" for name in tracked(*folders)} | set(tracked("hetstream"))
    wanted = {name for name in ours if not name.startswith("hetstream/slurm_plugin/packaging/")}
    wanted -= {f"hetstream/{folder}" for folder in folders}  # links in the checkout, and folders in the wheel
    wanted |= {data + name.removeprefix("sbatch_templates/") for name in tracked("sbatch_templates")}
    wanted |= {share + path.removeprefix("share/") for path in SHELLS.values()}
    wanted |= {f"{share}man/man1/{name}" for name in man_pages()}
    metadata = {name for name in names if name.startswith(f"hetstream-{version_of(dist)}.dist-info/")}
    assert names - metadata == wanted
    assert "hetstream/py.typed" in names
    plugin = "hetstream/slurm_plugin"
    assert {
        f"{plugin}/{name}" for name in ("lua/cli_filter.lua", "lua/policy.lua", "dashboard.json", "alerts.yml")
    } < names


@pytest.mark.shows("a wheel, an RPM and an EasyBuild module have every file that runs")
@pytest.mark.slow
def test_the_source_archive_makes_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    pip, python = Path(sys.executable).with_name("pip"), tmp_path / "venv/bin/python"
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    run(pip, "--python", python, "install", "-q", "hatchling", "hatch-vcs")
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    run(pip, "--python", SYSTEM_PYTHON, "wheel", "-q", "--no-deps", "-w", tmp_path, archive)
    assert contents(wheel_in(tmp_path)) == contents(wheel_in(dist))


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, each with the checksum of its bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


@pytest.fixture(scope="module")
def fresh(dist: Path) -> Path:
    """A virtual environment with the wheel and the packages of this one, which never sees the checkout."""
    directory = dist.with_name("fresh")
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/python3*/site-packages")
    (ours,) = {Path(path) for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")}
    for package in ours.iterdir():
        if "hetstream" not in package.name and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    pip = Path(sys.executable).with_name("pip")
    run(pip, "--python", directory / "bin/python", "install", "-q", "--no-deps", "--no-index", wheel_in(dist))
    return directory


@pytest.mark.shows("a wheel, an RPM and an EasyBuild module have every file that runs")
@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(dist: Path, fresh: Path, tmp_path: Path) -> None:
    hetstream, env = fresh / "bin/hetstream", {"PATH": f"{fresh}/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
    where = run(
        fresh / "bin/python",
        "-c",
        "from hetstream import slurm_plugin; print(slurm_plugin.__file__)",
        env=env,
        cwd=tmp_path,
    )
    assert Path(where.strip()).is_relative_to(fresh)
    assert "data workers" in run(hetstream, "--help", env=env, cwd=tmp_path)
    assert run(hetstream, "--version", env=env, cwd=tmp_path) == f"hetstream {version_of(dist)}\n"
    assert run(fresh / "bin/hetstreamd", "--help", env=env, cwd=tmp_path).startswith("usage: hetstream site daemon")
    # Completion and man pages are there as the package is; a site's copies are the same.
    installed = {path: (fresh / path).read_text() for path in SHELLS.values()}
    installed |= {path: (fresh / path).read_text() for path in (f"share/man/man1/{name}" for name in man_pages())}
    run(hetstream, "site", "install", "--prefix", tmp_path / "copies", env=env, cwd=tmp_path)
    assert {path: (tmp_path / "copies" / path).read_text() for path in installed} == installed
    assert installed[SHELLS["bash"]] == run(hetstream, "completion", "bash", env=env, cwd=tmp_path)
    planned = run(hetstream, "site", "install", "--prefix", tmp_path / "usr", "--dry-run", env=env, cwd=tmp_path)
    assert f"would create {tmp_path}/usr/share/hetstream/lua/cli_filter.lua\n" in planned
    (tmp_path / "train.py").write_text(QUICK_START)
    said = run(hetstream, "run", "--data-workers", "2", "python", "train.py", env=env, cwd=tmp_path)
    assert said.splitlines()[-1] == "right"
    # Doctor looks at a cluster; without one it says so in one line.
    done = subprocess.run(
        [hetstream, "doctor"], env=env | {"SLURM_CONF": "/nowhere"}, capture_output=True, text=True, check=False
    )
    *waits, line = done.stderr.splitlines()
    assert (done.returncode, line.partition(":")[0]) == (1, "hetstream doctor"), done
    assert all("has not answered" in each for each in waits), "scontrol looks for its file for a minute"


@pytest.mark.shows("a wheel, an RPM and an EasyBuild module have every file that runs")
@pytest.mark.slow
@needs("rpmbuild")
def test_the_rpm_is_built_and_holds_what_a_site_installs(dist: Path, tmp_path: Path) -> None:
    top = tmp_path / "rpm"
    # --nodeps: on Debian no RPM has installed Python.
    define = ("--define", f"_sourcedir {dist}", "--define", f"_topdir {top}", "--define", "_binary_payload w1.gzdio")
    run("rpmbuild", "-ba", "--nodeps", *define, dist / "hetstream.spec", timeout_s=900)
    (rpm,) = top.glob(f"RPMS/*/hetstream-{version_of(dist)}-1*.rpm")
    assert len(list(top.glob(f"SRPMS/hetstream-{version_of(dist)}-1*.src.rpm"))) == 1
    names = set(run("rpm", "-qlp", rpm).splitlines())
    assert {
        "/usr/bin/hetstream", "/usr/bin/hetstreamd", "/opt/hetstream/bin/hetstream",
        "/usr/share/hetstream/lua/cli_filter.lua", "/usr/share/hetstream/lua/job_submit.lua",
        "/usr/lib/systemd/system/hetstreamd.service", "/usr/lib/systemd/system/hetstream-exporter.service",
        "/usr/share/bash-completion/completions/hetstream", "/usr/share/man/man1/hetstream-why.1",
        "/opt/hetstream/share/hetstream/templates/single-gpu.sbatch",
    } < names  # fmt: skip
    settings = {f"/etc/hetstream/{name}" for name in ("policy.lua", "daemon.env", "exporter.env", "packing.env")}
    assert set(run("rpm", "-qcp", rpm).split()) == settings
    assert str(SYSTEM_PYTHON) in run("rpm", "-qpR", rpm).split()
    assert "zmq" not in run("rpm", "-qpR", rpm) + run("rpm", "-qp", "--provides", rpm)

    root = tmp_path / "root"
    root.mkdir()
    run("rpm", "-i", "--nodeps", "--root", root, rpm)
    unit = (root / "usr/lib/systemd/system/hetstreamd.service").read_text()
    assert '\nExecStart="/opt/hetstream/bin/hetstream" site daemon ' in unit
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    assert [path for path in files if bytes(top) in path.read_bytes()] == [], "nothing says where it was built"


@pytest.mark.shows("a wheel, an RPM and an EasyBuild module have every file that runs")
@pytest.mark.slow
@needs(str(LMOD))
def test_easybuild_builds_the_easyconfig(dist: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    venv.create(tools, with_pip=False, symlinks=True)
    pip = Path(sys.executable).with_name("pip")
    run(pip, "--python", tools / "bin/python", "install", "-q", "easybuild-framework==5.4.1", "easybuild-easyblocks")
    env = {"PATH": f"{tools}/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
    build = (
        f'. {LMOD}; eb --allow-use-as-root-and-accept-consequences --sourcepath="$1" --prefix="$2" "$3" >&2 &&'
        ' module use "$2/modules/all" && module load hetstream && command -v hetstream && hetstream --version &&'
        ' echo "path: $PYTHONPATH" && hetstream site install --prefix "$2/usr" --dry-run'
    )
    easyconfig = dist / f"hetstream-{version_of(dist)}.eb"
    said = run("bash", "-c", build, "bash", dist, tmp_path / "eb", easyconfig, env=env, cwd=tmp_path, timeout_s=600)
    command, version, path, first = said.splitlines()[:4]
    assert command == f"{tmp_path}/eb/software/hetstream/{version_of(dist)}/bin/hetstream"
    assert (version, path) == (f"hetstream {version_of(dist)}", "path: ")
    assert first.startswith("would create ")
