"""`python -m hetstream.slurm_plugin.cli`: the `hetstream` command where the console script is not on the path."""

import sys

from hetstream.slurm_plugin.cli import main

sys.exit(main())
