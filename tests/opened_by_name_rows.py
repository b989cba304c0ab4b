"""Why each call that reaches something by its name is safe: kind -> file -> functions; `*2`: two calls in one.

`test_opened_by_name.py` compares the rows with the syntax trees. A kind of `BY_RULE` is safe whoever else is on the
host. What the others reach, somebody may have prepared: they name scenarios of that test, or other files of tests.
"""

from __future__ import annotations

BY_RULE = {
    "kernel": "what the kernel shows (/proc, /sys, /dev), and libraries that the loader of root's system finds",
    "network": "addresses of a network, or abstract names: who is there proves a key, or nothing of his is believed",
    "installed": "files of hetstream's own installation",
    "program": "programs by PATH or by this interpreter's own path, as a shell would start them",
    "site": "what root's configuration names: /etc/hetstream, /etc/passwd, Slurm's files, policy-rc.d",
    "named": "what whoever runs it names himself, at the command line or in his program, as behind a shell's < and >",
    "descriptor": "what is open already, or lies by its plain name in a Directory that is",
}
HELD_BY: dict[str, tuple[str, ...]] = {
    "job": (
        "job directory",
        "program's Python",
        "note of the program's Python",
        "controller state",
        "events",
        "record",
        "past jobs",
        "address file",
        "address file's pipe",
        "tests/base/test_private.py",
    ),
    "private": (
        "temporary",
        "compiled features",
        "script of plain sbatch",
        "resume folder",
        "tests/hetjob/test_temporary.py",
    ),
    "packer": ("packer",),
    "page": ("page", "page to a pipe"),
    "grants": ("grants",),
    "socket": (
        "service",
        "client",
    ),
    "daemon state": ("daemon state",),
    "history": ("history",),
    "devcluster": (
        "devcluster exec",
        "devcluster status",
        "devcluster down",
        "devcluster up",
    ),
    "devcluster cache": ("devcluster cache",),
    "install": (
        "install",
        "uninstall",
    ),
    "lock": ("lock",),
    "regular": ("what a script reads",),
    "own directory": ("own directory",),
    "checkpoint": (
        "checkpoint",
        "checkpoint cleaning",
        "tests/checkpoint/test_untrusted.py",
        "tests/checkpoint/test_hostile.py",
        "tests/checkpoint/test_replica_strangers.py",
    ),
    "store": (
        "store",
        "tests/checkpoint/test_store.py",
        "tests/checkpoint/test_replica_strangers.py",
    ),
}

# A module's own level is `-`.
ROWS: dict[str, dict[str, str]] = {
    "kernel": {
        "checkpoint/disk/isolated_read.py": "_read",
        "checkpoint/flash/stopping.py": "_status",
        "checkpoint/memory/segment.py": "boot_id",
        "checkpoint/locks.py": "_libc",
        "checkpoint/persist/writer.py": "_be_modest",
        "hetjob/gpu/cuda.py": "HostPool.__init__",
        "hetjob/gpu/start.py": "_environ_of",
        "hetjob/master/memory.py": "_read*2 read_job_memory",
        "hetjob/master/elastic.py": "TrainerCpus._seconds",
        "hetjob/convert/step_command.py": "main",
        "hetjob/job/processes.py": "-",
        "hetstream/base/access.py": "SafeWalk.__init__ _uid_without_number*2",
        "hetstream/base/limits.py": "_data_bytes _fields _groups*2 _left_in*2",
        "hetstream/base/process.py": "is_of_step",
        "mpi_dataworkers/process/children.py": "_state_of adopt_orphans begin_child go_first going_first*2",
        "mpi_dataworkers/process/config.py": "environment_at_start",
        "mpi_dataworkers/loader/live_objects.py": "_answer _part_with_files*2",
        "mpi_dataworkers/loader/isolated_steps.py": "_left_bytes",
        "mpi_dataworkers/loader/witness.py": "_Output._all",
        "mpi_dataworkers/process/interpreter.py": "give_back_freed_memory keep_freed_memory",
        "mpi_dataworkers/ops/fork_safety.py": "_descriptors _threads",
        "mpi_dataworkers/ops/process_memory.py": "- PrivateMemory.written PrivatePages.own _paths _shared_lines",
        "mpi_dataworkers/ops/settings.py": "_umask",
        "mpi_dataworkers/partitioner/leaves.py": "-",
        "mpi_dataworkers/worker/worker.py": "OwnMemory._read",
        "mpi_dataworkers/worker/process.py": "count_oom_kills*2",
        "slurm_plugin/cli/__init__.py": "_drop_stdout",
        "slurm_plugin/cli/gpu_report.py": "_numbers*2",
        "slurm_plugin/coordinator/admission.py": (
            "_began _has_torch _own_word _uid_of guaranteed_processes*2 slurm_job_of"
        ),
        "slurm_plugin/coordinator/gpus.py": "driver",
        "tests/devcluster/cgroups.py": "enter*2 groups_of remove_groups",
        "tests/devcluster/kernel.py": "- enter_namespace",
        "tests/devcluster/processes.py": "_command _environment _stat cluster_processes",
        "slurm_plugin/insight/utilisation.py": "_mount_points",
    },
    "network": {
        "hetstream/base/web.py": "_listen",
        "mpi_dataworkers/transports/shm.py": "ShmReceiver.__init__ _Channel.__init__",
        "mpi_dataworkers/transports/sockets.py": "SocketReceiver._listen _Channel.__init__ local_address_towards",
        "mpi_dataworkers/transports/zmq.py": (
            "ZmqDispatcherEndpoint.__init__ _Gate.__init__ _ZmqControl._connect _ZmqControl._look_for_port"
        ),
        "tests/devcluster/boot.py": "_is_free",
        "tests/devcluster/supervisor.py": "_is_ready",
    },
    "installed": {
        "mpi_dataworkers/images/decoder.py": "_native",
        "mpi_dataworkers/ops/prefix_cache.py": "_content _installed",
        "hetstream/base/installed.py": "_requirement*2",
        "slurm_plugin/cli/completion.py": "installed_man_pages",
        "slurm_plugin/cli/report.py": "run_exporter",
        "slurm_plugin/cli/install.py": "planned*2",
        "slurm_plugin/install/units.py": "node_script",
    },
    "program": {
        "checkpoint/persist/writer.py": "spawn_writer",
        "hetjob/gpu/startup/sitecustomize.py": "_run_hidden",
        "hetjob/site/client.py": "_run",
        "hetjob/convert/step_command.py": "_appends _of_plugins main",
        "hetstream/base/process.py": "_Loader.exec_module",
        "mpi_dataworkers/hook/path/sitecustomize.py": "_install_command*2 _run_hidden",
        "mpi_dataworkers/process/interpreter.py": "take_hash_seed",
        "slurm_plugin/cli/gpu.py": "run_gpu_run",
        "slurm_plugin/client/run.py": "_run become",
        "tests/devcluster/apt.py": "run_quietly",
        "tests/devcluster/namespaces.py": "_ip",
        "slurm_plugin/install/doctor.py": "read_gpus",
        "slurm_plugin/submit/program.py": "become",
    },
    "site": {
        "hetstream/base/access.py": "_is_private_group",
        "hetjob/master/server.py": "hole_options",
        "hetjob/site/client.py": "read_settings",
        "hetjob/site/site_file.py": "in_site_file",
        "slurm_plugin/cli/install.py": "_lua _notes _programs _text_of",
        "tests/devcluster/install.py": "_forbids_starts no_service_starts*8",
        "slurm_plugin/install/doctor.py": "_texts missing_files modules_of",
    },
    "named": {
        "hetjob/gpu/emulated_file.py": (
            "EmulatedGpuFile.__init__ EmulatedGpuFile._locked EmulatedGpuFile._try_lock EmulatedGpuFile.create*2"
        ),
        "hetstream/base/faults.py": "_strike",
        "mpi_dataworkers/loader/statistics.py": "SkippedSamples._write*3 writing_problem*3",
        "mpi_dataworkers/ops/import_effects.py": "- appends_to_nowhere appends_to_nowhere.open",
        "mpi_dataworkers/ops/process_memory.py": "_mapping_of*2",
        "mpi_dataworkers/ops/program.py": "_source_of enter_program",
        "mpi_dataworkers/sources/tables.py": (
            "CsvDataset._header CsvDataset._line CsvDataset._line_of CsvDataset._row_starts CsvDataset._rows _opened"
        ),
        "mpi_dataworkers/sources/hdf5.py": "_open",
        "mpi_dataworkers/images/folder.py": (
            "ImageFolder.__init__ ImageFolder._images ImageFolder._make ImageTar.__init__ _samples_of"
        ),
        "slurm_plugin/cli/submit.py": "_read_script run_convert",
        "slurm_plugin/cli/cluster_source.py": "read_text",
        "slurm_plugin/cli/run.py": "run",
        "slurm_plugin/cli/explain.py": "run_explained",
        "slurm_plugin/client/fake.py": "FakeSlurm.submit",
        "slurm_plugin/install/installation.py": "put_below",
        "slurm_plugin/packaging/recipes.py": "_fill*2 main*2",
        "slurm_plugin/packing/quota_file.py": "QuotaFile._read*2",
    },
    "descriptor": {
        "checkpoint/flash/sources.py": "_open_shared",
        "mpi_dataworkers/images/decoder.py": "_decodes_as_pillow make_image",
        "checkpoint/flash/candidates.py": "RestoreTrial._prepare*2",
        "checkpoint/persist/store_writer.py": "StoreWriter.advance",
        "hetjob/gpu/orders.py": "make_orders make_work",
        "hetstream/base/files.py": "Directory.names Directory.open Directory.read",
        "mpi_dataworkers/ops/cache_store.py": ("CacheStore._alone CacheStore._hold*2 CacheStore.get _is_free"),
        "mpi_dataworkers/worker/fork_server.py": "Exchange.keep _locked _opened",
        "slurm_plugin/coordinator/table.py": "look",
    },
    "job": {
        "hetjob/job/find_service.py": "_is_own _only_one*2 job_directory",
        "hetjob/job/ended_job.py": "_files jobs_left load_summary remove*2 write_summary",
        "hetjob/master/companions.py": "CompanionJobs._number_after_those_of_before CompanionJobs.submit",
        "hetjob/master/controller_state_file.py": "ControllerStateFile.__init__ ControllerStateFile.write told_by",
        "hetjob/master/server.py": (
            "MasterConfig.read _tidy*7 lead_to_journal remove_journal*2 remove_left_journal start*2"
        ),
        "hetjob/master/memory.py": "Migration.begin",
        "hetjob/job/processes.py": "start_child",
        "hetjob/job/job.py": "_num_ready",
        "hetjob/job/embedding_servers.py": (
            "EmbeddingServers.held _ends _files_in _is_compressed _is_held*2 _starts_in _why_needed logs_left*2 "
            "remove_registrations remove_unneeded"
        ),
        "mpi_dataworkers/embedding/background.py": "keep_registered register",
        "mpi_dataworkers/embedding/registration.py": "read_registrations",
        "mpi_dataworkers/dispatcher/events.py": "EventLog.__init__ _opened",
        "mpi_dataworkers/dispatcher/server.py": "Journal._open _write_summary remove_leftovers*2",
        "mpi_dataworkers/process/interpreter.py": "announce announced remove_announcement",
        "mpi_dataworkers/wire/address.py": "read_address_file*2 remove_address_file write_address_file*2",
        "mpi_dataworkers/wire/pipeline_transfer.py": "_write*6 read_into*2 remove_all remove_unused*2",
        "slurm_plugin/cli/ckpt.py": "run_ckpt_writer*3",
        "slurm_plugin/cli/job.py": "run_clean run_logs",
        "slurm_plugin/cli/master.py": "_keep",
        "slurm_plugin/insight/proposals.py": "_directories",
    },
    "private": {
        "checkpoint/integrations/huggingface.py": "FlashCheckpointCallback.resume_folder*7",
        "hetjob/master/local.py": "LocalLauncher.last_words",
        "mpi_dataworkers/process/children.py": "keep_apart",
        "hetjob/job/processes.py": "_is_nobodys*2 remove_leftovers*2 temporary_directory*5",
        "mpi_dataworkers/compiling.py": "compiled*3",
        "mpi_dataworkers/gpu_features/triton_cache.py": "_of_this_process _private _remove _why_not",
        "mpi_dataworkers/partitioner/unmodified.py": "_explain",
        "slurm_plugin/cli/explain.py": "_findings*3",
        "slurm_plugin/cli/filter.py": "_convert*3 run",
        "slurm_plugin/cli/migrate.py": "_submit*2",
        "slurm_plugin/cli/submit.py": "_submit",
        "slurm_plugin/client/slurm.py": "CommandSlurm.batch_script*2",
    },
    "packer": {
        "slurm_plugin/cli/packer.py": "alone*3",
    },
    "page": {
        "slurm_plugin/cli/report.py": "write_whole*4",
    },
    "grants": {
        "slurm_plugin/coordinator/admission.py": "GrantedJobs._grant GrantedJobs.is_reserved",
    },
    "socket": {
        "hetstream/base/unix_sockets.py": "connect_to listen_at*4",
        "hetstream/base/web.py": "WebServer.close",
        "slurm_plugin/coordinator/server.py": "Coordinator._close",
        "slurm_plugin/daemon/server.py": "Daemon._listen Daemon.run",
    },
    "daemon state": {
        "slurm_plugin/daemon/store.py": "Store.__init__ Store._connect _LeftState._connect*2",
        "hetstream/base/locks.py": "hold_directory",
        "slurm_plugin/database.py": "make_place",
    },
    "history": {
        "slurm_plugin/database.py": "check_beside create_private",
        "slurm_plugin/insight/observation.py": "History._connect",
        "slurm_plugin/past_jobs.py": "JobHistory._connect*3 JobHistory._key_of_place _read_key*2",
    },
    "devcluster": {
        "tests/devcluster/boot.py": ("_check_can_boot _log_tail _make_fake_gpu*2 _make_files*11 _start_supervisor*3"),
        "tests/devcluster/record.py": "_read_json _write_json*2",
        "tests/devcluster/site_setup.py": (
            "_make_database*2 _make_own_run*4 _make_shared_gpus*4 _write_script*2 make_files*2"
        ),
        "tests/devcluster/status.py": "_with_power",
        "tests/devcluster/supervisor.py": "_become*3 main",
        "tests/devcluster/teardown.py": "_remove_files*4 _remove_if_empty*2",
    },
    "devcluster cache": {
        "tests/devcluster/roots.py": "_adapt_programs*3 _build*9 loader prepare_root*4",
    },
    "install": {
        "slurm_plugin/install/installation.py": "_digest _write*3 install read_record uninstall*6",
    },
    "lock": {
        "hetstream/base/locks.py": "own_lock*3 wait_for_lock",
    },
    "regular": {
        "hetstream/base/files.py": "read_regular*2",
    },
    "own directory": {
        "mpi_dataworkers/embedding/log.py": "open_log",
        "hetstream/base/files.py": "_own own_directory",
        "mpi_dataworkers/ops/cache_store.py": "remove_from_memory",
    },
    "checkpoint": {
        "checkpoint/convert/dcp.py": "FlashStorageReader._object attempt_on detect*3",
        "checkpoint/convert/weights.py": (
            "_Reader.read_metadata*2 _new_file _write_dcp*5 load_safetensors load_weights_only plan_state save_torch*2"
        ),
        "checkpoint/disk/rank_file.py": "RankFile.check bytes_on_disk",
        "checkpoint/disk/directory.py": (
            "CheckpointDirectory._look_at CheckpointDirectory.check_own CheckpointDirectory.check_start "
            "CheckpointDirectory.go_back mark"
        ),
        "checkpoint/disk/commit.py": (
            "_generations _own complete holding manifests_in problem_of_latest target_of_latest"
        ),
        "checkpoint/disk/ownership.py": (
            "Claim.__init__ Claim.ask Claim.withdraw _append*2 _lock history lineage_of living_request "
            "prepare_directory*2 read_owner read_request renumber take*2"
        ),
        "checkpoint/replica/wire.py": "_folder _read_private _remove",
    },
    "store": {
        "checkpoint/flash/storage.py": "CheckpointStorage.close",
        "checkpoint/locks.py": "FileLock._try FileLock.release FileLock.try_exclusive FileLock.try_shared",
        "checkpoint/memory/store_recovery.py": "_adopt*2 _make*5 _write_holder give_up",
        "checkpoint/memory/segment.py": "Segment.create*2 _open",
        "checkpoint/memory/slots.py": (
            "SlotMemory._create_in_fallback SlotMemory.replace*3 take_slots unlink_with_target*2"
        ),
        "checkpoint/memory/store.py": ("Store.__init__ Store.close Store.forget Store.mark_closed WakePipe.__init__*2"),
        "checkpoint/memory/store_files.py": (
            "StoreFiles._called StoreFiles.delete*5 StoreFiles.forget_others*2 StoreFiles.holder "
            "StoreFiles.outstanding_bytes*2 StoreFiles.read_start_id StoreFiles.read_status StoreFiles.reserve "
            "StoreFiles.stop_reason StoreFiles.write_start_id*2 StoreFiles.write_status*3 "
            "StoreFiles.write_stop_reason*4 list_stores make_fallback"
        ),
        "checkpoint/memory/view.py": "StoreView.fileno _is_orphaned",
        "checkpoint/replica/wire.py": "read_order write_order",
        "checkpoint/replica/service.py": "forget_others make_slot*3",
    },
}

# The same of scripts in other languages: file -> word -> how often, and why it is safe.
SCRIPT_ROWS: dict[str, dict[str, tuple[int, str]]] = {
    "slurm_plugin/lua/cli_filter.lua": {
        "io.open": (2, "the user's own script by the path that sbatch found, /proc and /dev; files of os.tmpname"),
        "os.tmpname": (2, "made with mode 0600 in /tmp, which is root's and has a sticky bit, whatever TMPDIR says"),
        "os.execute": (2, "the user's shell, in the user's own sbatch; each word in it is quoted, or a number"),
        "os.remove": (2, "what os.tmpname has made"),
    },
    "slurm_plugin/prolog/epilog.sh": {
        "rm": (1, "below $run, behind is_own"),
    },
    "slurm_plugin/prolog/own.sh": {
        "find": (1, "the look itself: it opens nothing, and follows no link"),
    },
    "slurm_plugin/prolog/prolog.sh": {
        ".": (2, "root's settings: /etc/hetstream/packing.env"),
        ">": (1, "below $run, behind is_own"),
        "cat": (2, "a grant below $run, behind is_own; and the standard input of put"),
        "logger": (1, "a program of the system, by a PATH that the script sets"),
        "mkdir": (2, "below $run, behind is_own"),
        "mv": (2, "below $run, behind is_own"),
        "rm": (3, "below $run, behind is_own"),
        "sed": (3, "what the driver shows in /proc, and standard input"),
    },
    "slurm_plugin/prolog/task_prolog.sh": {
        ".": (2, "root's settings: /etc/hetstream/packing.env"),
        "<": (1, "below $run, behind is_own"),
    },
}
