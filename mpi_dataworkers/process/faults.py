"""Where tests make processes of the data plane die or stop, by HETSTREAM_FAULT; see `hetstream.base.faults`."""

from __future__ import annotations

from hetstream.base.faults import InjectionPoints
from hetstream.mpi_dataworkers.process.config import faults_from_environment

POINTS = {
    "dispatcher.received": "a burst of messages has come and nothing is decided",
    "dispatcher.decided": "it is decided what to do, nothing is written",
    "dispatcher.before_commit": "a group of changes is written to the journal and not committed",
    "dispatcher.after_commit": "a group of changes is committed",
    "dispatcher.before_send": "the next message is not sent",
    "dispatcher.after_send": "a message has just been sent",
    "worker.registered": "the dispatcher has let the data worker in",
    "worker.lease_received": "a lease has come and is not begun",
    "worker.before_make": "a step is next, its samples are not read",
    "worker.after_make": "a batch is made and not sent",
    "worker.batch_sent": "a batch was handed to the transport",
    "worker.before_finish": "all steps of a lease are sent, the dispatcher has not been told",
    "worker.after_finish": "the dispatcher is being told that a lease is done",
    "worker.draining": "the dispatcher is being told that the data worker leaves",
    "loader.registered": "the dispatcher has let the loader in",
    "loader.batches_received": "batches have come and are not looked at",
    "loader.before_report": "progress is to be reported",
    "loader.after_report": "progress was reported",
    "loader.step_taken": "the training loop is about to get a step",
    "loader.state_taken": "the program is about to get the loader's state",
    "embedding.in_record": "the beginning of a record is in an embedding server's log, the rows are not",
    "embedding.before_fsync": "records are in the log's file, and may not be on the disk",
    "embedding.base_written": "all rows are in the new base of a log, which has not its name yet",
    "embedding.part_sent": "some rows of a part were sent to another embedding server",
    "embedding.part_received": "some rows of a part have come from another one, or from a log",
    "embedding.before_held": "all rows of parts have come, nothing says that they are here",
    "embedding.before_answer": "a change is made and in the log, nobody was told",
    "daemon.received": "the site daemon knows who reports and has decided nothing",
    "daemon.before_commit": "a job's report and the new limits are written and not committed",
    "daemon.after_commit": "they are committed, the job has no answer",
    "daemon.read": "the cluster was read, nothing of it is noted",
    "packer.cleared": "a job has lost its place of before, and has no new one",
    "packer.updated": "a held job has its place, and is not released",
    "packer.released": "a job is released, nothing has looked whether it starts",
    "packer.started": "a job has started, and may have less time than it asks for",
    "packer.announced": "it is noted that the packer is about to hold a job",
    "packer.held": "a job that did not start is held again, nothing is noted",
    "packer.requeued": "a job is taken off its GPU, nothing is noted",
    "packer.granted": "a job with quota is released",
    "packer.moved": "a guaranteed job has become one that waits for a place",
    "packer.kept": "a job that keeps a GPU for another one is submitted, others may not be",
    "packer.dropped": "jobs that keep GPUs in vain are cancelled",
    "packer.began": "it is noted that nodes may call a job guaranteed from now on",
    "packer.upgraded": "nodes are told to call a job guaranteed, nothing is noted",
    "packer.noted": "a job is guaranteed, and noted as that",
}
FAULTS = InjectionPoints("HETSTREAM_FAULT", POINTS, faults_from_environment())
reach = FAULTS.reach
