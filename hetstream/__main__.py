"""`python -m hetstream` is the `hetstream` command."""

import sys

from hetstream.slurm_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
