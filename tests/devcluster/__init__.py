"""A throw-away Slurm cluster on one machine: real munge, slurmctld and slurmd, fake GPUs, no systemd.

    spec.py        what a cluster is: shape, ports, paths (pure)
    network.py     names and addresses of hosts with a network of their own (pure)
    namespaces.py  that network made, removed and entered
    render.py      slurm.conf, gres.conf, cgroup.conf as text (pure)
    sites.py       what kinds of sites need beside that: text and commands (pure)
    packing.py     GPUs that several jobs share: text, paths and commands (pure)
    site_setup.py  the files and daemons of both
    private_run.py a /run of the cluster's own
    programs.py    where Slurm's programs are: on the host, or in a Debian root
    apt.py         apt-get and its like, without questions
    lock.py        one `up` at a time
    install.py     Debian's packages on the host
    roots.py       cached Debian roots with newer Slurm
    record.py      the files by which a cluster is found again
    supervisor.py  the process that starts the daemons and adopts everything they start
    processes.py   which processes belong to a cluster
    status.py      how a cluster is
    boot.py        up
    teardown.py    down

Called by `__main__.py` and by the tests marked `slurm`. It never touches a Slurm that is already on
the host and starts no system service. Without a network, control groups or a
/run of its own it mounts nothing.
"""
