"""What would have happened: a discrete-event simulator of a Slurm cluster with elastic data workers.

    readers -> Workload --\
                           simulate(workload, cluster, scenario) -> Outcome -> metrics -> table, JSON
    Cluster --------------/

Everything here is pure but for the reading of files, which the command does. The policies that divide data workers
are the daemon's own (`hetstream.slurm_plugin.policy`).
"""
