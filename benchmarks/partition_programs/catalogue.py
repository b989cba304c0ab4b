"""All programs by name."""

from __future__ import annotations

from benchmarks.partition_programs.others import CNN, DEPENDS_ON_DATA, NOTHING_TO_MOVE, TRANSFORMER
from benchmarks.partition_programs.recommenders import DEEPFM, DIN, DLRM, WIDE_AND_DEEP

PROGRAMS = {
    program.name: program
    for program in (DLRM, DEEPFM, WIDE_AND_DEEP, DIN, CNN, TRANSFORMER, NOTHING_TO_MOVE, DEPENDS_ON_DATA)
}
