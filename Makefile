# Two commands do everything on a fresh Debian machine with Python: `make demo` (and `demo-dlrm`) and `make test`.
# They make a virtual environment in .venv and, as root, install Debian's Slurm packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is pinned here alone: an open range pulls gigabytes of CUDA packages onto machines without a GPU.
TORCH ?= torch==2.13.0
# What pyproject.toml declares. Where TORCH is another one, `make test-all` runs the tests of what uses torch on this, too:
# 6 GB on the disk, as package indexes have older releases for Linux with CUDA's libraries alone.
OLDEST_TORCH := torch==$(shell sed -n 's/^torch = \["torch>=\(.*\)"\]$$/\1/p' pyproject.toml)
OLDEST_VENV := .venv-oldest-torch
DATA_BENCHMARKS := transport partition tensors leases overhead step_terms scale kill startup threads sharing coordinated resume soak features fusion hdf5 compared cache slow
# Needs root and Slurm.
SLURM_BENCHMARKS := elastic stages holes site_load fidelity
# Job lists come from ../shared/traces; where there are none they are made up.
CLUSTER_BENCHMARKS := sched opp simulate cost model frag
CKPT_BENCHMARKS := ckpt_save ckpt_stall ckpt_disk ckpt_restore ckpt_kill ckpt_growth ckpt_requeue ckpt_migrate

# What the demo needs, and nothing of the developers' tools.
DEMO_VENV := .venv-demo

# Checkouts of other projects' tests, and the environment that they need: the project's own with some packages more.
# Folders of peers' files: some that are given, and those that test-peers collects; CLONES=DIR: from clones (test-all, too).
PEERS ?= ../shared/peers build/peers
PEERS_VENV := .venv-peers-tests
# torchrec for TORCH, and what it imports that depends on torch.
NNUNET := nnunetv2==2.8.1 batchgenerators==0.25.5 batchgeneratorsv2==0.3.6 dynamic-network-architectures==0.4.4 acvl-utils==0.2.6 connected-components-3d fft-conv-pytorch blosc2 msgpack ndindex numexpr yacs future unittest2
# With what they import; two of them have clients of clouds.
STREAMS := webdataset==1.0.2 litdata==0.2.76 mosaicml-streaming==0.13.0 braceexpand boto3 botocore s3transfer jmespath obstore brotli python-snappy cramjam zstd catalogue
# Those whose loaders are more than torch's; torchio and Megatron's datasets.
OTHERS := torchio==1.2.1 megatron-core==0.16.1 jaxtyping wadler-lindig humanize nibabel deprecated wrapt
# Peers of bench-images. With torch as it is built for CUDA, since torchvision's decoder is for no other; 7 GB on the disk.
IMAGES_VENV := .venv-images
IMAGES := "torch===2.13.0" torchvision==0.28.0 spdl-core==0.8.0 spdl-io==0.8.0 nvidia-dali-cuda120==2.4.0 litdata==0.2.76 tensorsocket==0.0.5 simplejpeg==1.9.0
FFCV := numba opencv-python-headless fastargs assertpy terminaltables tqdm psutil pandas
TORCHREC := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict

.PHONY: docs demo demo-dlrm test test-all test-oldest-torch test-peers style lint compiled venv slurm programs all-programs packages record-release clean gpu gpu-wheels bench-data bench-ckpt bench-slurm bench-cluster

venv: $(VENV)/.ready

# An environment with an extra of the package: $(1) the environment, $(2) the extra.
define environment
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; } || { \
  echo "python3-venv is missing: apt-get install python3-venv" >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
@# Not compiled: of 14,000 modules most are never imported, and half of the time went into them.
$(1)/bin/pip install -q --disable-pip-version-check "$(TORCH)" -e '.[$(2)]' --no-compile
@# The throw-away cluster is a command of the checkout alone.
@printf '#!%s\nimport sys\n\nsys.path.insert(0, "%s")\nfrom tests.devcluster.__main__ import main\n\nsys.exit(main())\n' \
  "$(CURDIR)/$(1)/bin/python" "$(CURDIR)" >$(1)/bin/devcluster && chmod +x $(1)/bin/devcluster
@touch $(1)/.ready
endef

$(VENV)/.ready: pyproject.toml
	$(call environment,$(VENV),dev)

$(DEMO_VENV)/.ready: pyproject.toml
	$(call environment,$(DEMO_VENV),demo)
	@# What the runs import is compiled before: the first one would pay for both.
	@env -u PYTHONDONTWRITEBYTECODE sh -c '$(DEMO_VENV)/bin/python -c "import h5py, scipy.ndimage, sklearn.datasets, torch" && \
	  $(DEMO_VENV)/bin/python -m compileall -q hetstream/*/'

# Real Slurm for the demo and the tests; without root or apt both go on without it and say so.
slurm: venv
	@$(BIN)/devcluster install || echo "Slurm is not installed: tests marked slurm will skip" >&2

# Interpreters, shells and the like; what cannot be had is said here, and its tests are skipped.
programs: venv
	@$(BIN)/python -m tests.programs

all-programs: venv
	@$(BIN)/python -m tests.programs --all

# build/demo.json has its figures, build/demo.svg the picture that docs/demo.svg is one of.
demo: $(DEMO_VENV)/.ready
	@$(DEMO_VENV)/bin/devcluster install || echo "Slurm is not installed: the demo runs without" >&2
	$(DEMO_VENV)/bin/python sbatch_templates/digits/demo.py --json build/demo.json

# The second demo: rows of a table, a feature graph and a recommendation model; it needs no Slurm.
demo-dlrm: $(DEMO_VENV)/.ready
	$(DEMO_VENV)/bin/python sbatch_templates/dlrm/demo.py

style: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

# Four files at a time, where each test process can have a /dev/shm of its own: tests look for leaks there. One of the
# four waits for Slurm most of the time, and tests wait for programs (tests/sharing_out.py): two cores are enough.
TOGETHER := $(shell unshare --mount true 2>/dev/null && echo "-n 4 --dist loadfile")

# Tests start thousands of programs: none of them compiles hetstream or what it imports anew, also where
# PYTHONDONTWRITEBYTECODE is set. Nor does each test process rewrite the assertions of all tests.
compiled: venv
	$(BIN)/python -m compileall -q hetstream hetjob mpi_dataworkers checkpoint slurm_plugin benchmarks tests
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -p no:cacheprovider --collect-only -q >/dev/null 2>&1 || true

# mypy has one core for half a minute, beside what has the other. It ends before the tests do, and is heard after them.
test: venv slurm programs style
	@mkdir -p build
	@$(BIN)/mypy >build/mypy.txt 2>&1 & types=$$!; \
	  make --no-print-directory compiled; \
	  $(BIN)/pytest $(TOGETHER) -m "not slow and not gpu and not mpi"; tests=$$?; \
	  wait $$types; types=$$?; cat build/mypy.txt; [ $$types = 0 ] && exit $$tests

# The tests of a site with accounting need slurmdbd and MariaDB, too. Public scripts that cannot be had are named, and
# where too few can, the test that needs them is skipped.
test-all: venv slurm all-programs lint compiled test-oldest-torch
	@$(BIN)/python -m tests.devcluster install --site accounting || echo "slurmdbd is not installed: its tests fail" >&2
	-$(BIN)/python tests/peers/sbatch_corpus.py $(if $(CLONES),--clones $(CLONES))
	$(BIN)/pytest

ifeq ($(TORCH),$(OLDEST_TORCH))
test-oldest-torch:
	@echo "all tests run on $(OLDEST_TORCH), the oldest that is declared"
else
test-oldest-torch: $(OLDEST_VENV)/.ready
	$(OLDEST_VENV)/bin/pytest $(TOGETHER) -m "not slow and not slurm and not gpu and not mpi" tests/checkpoint tests/mpi_dataworkers

$(OLDEST_VENV)/.ready: pyproject.toml
	@test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip install -q --disable-pip-version-check "$(OLDEST_TORCH)"
	$(OLDEST_VENV)/bin/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@
endif

$(PEERS_VENV)/.ready: $(VENV)/.ready tests/peers/requirements.txt
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python tests/peers/layer.py $(BIN)/python
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check -r tests/peers/requirements.txt
	@# Without what it depends on: its loaders need no audio, and torchaudio has no build for every torch.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps speechbrain==1.1.2
	@# Each release of these is for one release of torch, which they would replace by a build for GPUs.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps $(TORCHREC)
	@# torchvision lies apart: as built for CUDA, packages that import it where it is there would fail.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --target $(PEERS_VENV)/torchvision torchvision==0.28.0
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps pytorch-ignite==0.5.5 monai==1.6.1 timm==1.0.31 skorch==1.4.0 torch_geometric==2.8.0
	@# It asks for an older release of datasets, which its tests of checkpoints do not use.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps torchtitan==0.3.0 torch_checkpointing==0.1.1 spmd_types==0.2.3
	@# nnU-Net, libraries of streams and others, without what would bring another torch.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps $(NNUNET) $(STREAMS) $(OTHERS)
	@# Apart, as Lightning has other loggers where it is.
	$(PEERS_VENV)/bin/pip install -q --disable-pip-version-check --no-deps --target $(PEERS_VENV)/tensorboard tensorboard==2.21.0 protobuf
	@touch $@

test-peers: $(PEERS_VENV)/.ready
	-$(PEERS_VENV)/bin/python tests/peers/suite_files.py $(if $(CLONES),--clones $(CLONES))
	$(PEERS_VENV)/bin/python -m pytest -q tests/mpi_dataworkers/test_torchrec.py tests/peers/test_random_numbers.py tests/peers/test_timm_train.py tests/peers/test_streams.py tests/peers/test_nnunet.py tests/peers/test_other_loaders.py tests/peers/test_tables.py tests/mpi_dataworkers/partitioner/test_public_models.py
	@# Alone: what torchvision registers with torch, a process can register once.
	$(PEERS_VENV)/bin/python -m pytest -q tests/peers/test_torchvision_images.py
	$(PEERS_VENV)/bin/python tests/peers/suites.py $(addprefix --peers ,$(PEERS))

# The documentation as a site, build/site/index.html, of the files in docs/, with search. It fetches nothing from elsewhere.
docs:
	@test -x .venv-docs/bin/zensical || { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install -q --disable-pip-version-check zensical==0.0.73; }
	.venv-docs/bin/zensical build --strict

# A wheel, and beside the wheels of what it needs an RPM spec and an easyconfig, for an interpreter of the system: PYTHON=.
packages: venv
	rm -rf dist
	$(BIN)/pip --python $(PYTHON) wheel -q --disable-pip-version-check -w dist .
	$(BIN)/python slurm_plugin/packaging/recipes.py dist $$(command -v $(PYTHON))

# What the tests of later releases read: once, before the version goes up.
record-release: venv
	$(BIN)/python -c 'import sys; from tests.upgrade.record import main; sys.exit(main())'

# One benchmark by name, as in `make bench-transport` or `make bench-gpu_sharing ARGS=--cpu`; all of the data plane one after the other, which takes an hour.
bench-%: venv
	$(BIN)/python -m benchmarks.$* $(ARGS)

# In the environment of peers' tests, which has nnU-Net, torchrec and libraries of streams.
bench-nnunet bench-streams bench-embedding: bench-%: $(PEERS_VENV)/.ready
	$(PEERS_VENV)/bin/python -m benchmarks.$* $(ARGS)

# SPDL takes FFmpeg from the system, and FFCV is built with the system's OpenCV: what cannot be had is a row without a value.
$(IMAGES_VENV)/.ready: pyproject.toml
	@test -x $(IMAGES_VENV)/bin/python || $(PYTHON) -m venv $(IMAGES_VENV)
	$(IMAGES_VENV)/bin/pip install -q --disable-pip-version-check --no-compile $(IMAGES) -e '.[images]'
	-@[ "$$(id -u)" != 0 ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends libavcodec59 libavformat59 \
	  libavfilter8 libavdevice59 g++ pkg-config libopencv-dev libturbojpeg0-dev >/dev/null; }
	-$(IMAGES_VENV)/bin/pip install -q --disable-pip-version-check --no-compile $(FFCV)
	-$(IMAGES_VENV)/bin/pip install -q --disable-pip-version-check --no-deps ffcv==1.0.2
	@touch $@

bench-images: $(IMAGES_VENV)/.ready
	$(IMAGES_VENV)/bin/python -m benchmarks.images $(ARGS)

bench-data: $(addprefix bench-,$(DATA_BENCHMARKS))

# Policies, plans and placement of the cluster, by simulation.
bench-cluster: $(addprefix bench-,$(CLUSTER_BENCHMARKS))

bench-slurm: slurm $(addprefix bench-,$(SLURM_BENCHMARKS))

# Those of checkpoints; ckpt_requeue needs root and Slurm.
bench-ckpt: slurm $(addprefix bench-,$(CKPT_BENCHMARKS))

# On a machine with a GPU, with a Python that has torch and nothing of ours: no environment is made, and that of `make venv`
# is used only where PYTHON has no torch. Where only a few files come back from, `make gpu OUT=FOLDER` keeps all results in
# two. docs/gpu-session.md
gpu:
	@python=$(PYTHON); $$python -c 'import torch' 2>/dev/null || { test -x $(BIN)/python && python=$(BIN)/python; }; \
	  $$python -m benchmarks.gpu_session $(if $(OUT),--bundle $(OUT)) $(ARGS)

# Beforehand, where there is a network: what that Python may lack. The folder goes along with the checkout.
gpu-wheels: venv
	@$(BIN)/python -m benchmarks.gpu_wheels

clean:
	rm -rf build dist $(VENV) .venv-*
