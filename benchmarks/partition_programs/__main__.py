"""Trains one of the programs and prints its losses."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.partition_programs.catalogue import PROGRAMS
from benchmarks.partition_programs.training import train

parser = argparse.ArgumentParser(prog="partition_programs")
parser.add_argument("name", choices=sorted(PROGRAMS))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--accelerator-ms", type=float, default=0.0, help="time of the emulated accelerator for each step")
parser.add_argument("--times", type=Path, help="write the time at the end of each step there")
args = parser.parse_args()
torch.set_num_threads(1)
program = replace(PROGRAMS[args.name], accelerator_ms=args.accelerator_ms)
ends: list[float] = []
for loss in train(program, args.steps, args.num_workers, ends):
    sys.stdout.write(f"{loss}\n")
if args.times is not None:
    args.times.write_text("\n".join(f"{end:.6f}" for end in ends))
