"""horovodrun, which gives ranks a minute to end instead of 5 s: a slow machine then fills the same cells.

horovodrun starts each rank by a process of its own, which imports this file, too.
"""

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.launch import run_commandline

safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = 60

if __name__ == "__main__":
    run_commandline()
