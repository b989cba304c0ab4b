"""Write rows in the form of Criteo's display advertising data: `python prepare.py criteo.csv`.

Each row has a number, a label, 13 counts with gaps and 26 categories as hexadecimal ids with gaps. The values of a
column are drawn from those of the same column of a sample, where one is given, and else from a generator alone. Labels
are drawn from a hidden model of some of the columns, so that there is something to learn. One seed, one file.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

COUNTS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


def columns_of(sample: Path | None, draw: np.random.Generator) -> dict[str, list[str]]:
    """Values of each column to draw from; "" is a gap."""
    if sample is not None:
        with sample.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return {name: [row[name] for row in rows] for name in (*COUNTS, *CATEGORIES)}
    made = {}
    for name in COUNTS:
        made[name] = ["" if draw.random() < 0.2 else str(int(value)) for value in draw.lognormal(2, 2, 200)]
    for name in CATEGORIES:
        ids = draw.integers(0, 2**32, draw.integers(3, 200))
        ranks = np.minimum(draw.zipf(1.3, 200), len(ids)) - 1
        made[name] = ["" if draw.random() < 0.1 else f"{ids[rank]:08x}" for rank in ranks]
    return made


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write rows in the form of Criteo's.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--sample", type=Path, help="a CSV file with such rows: label, I1 to I13, C1 to C26")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = np.random.default_rng(args.seed)
    known = columns_of(args.sample, draw)
    score = np.full(args.rows, -1.0)
    drawn = {}
    for at, (name, values) in enumerate(known.items()):
        places = draw.integers(0, len(values), args.rows)
        drawn[name] = [values[place] for place in places]
        if at % 4 == 0:  # these columns say something about the label
            weight_of = {value: draw.normal(0, 0.8) for value in sorted(set(values))}
            score += np.array([weight_of[value] for value in drawn[name]])
    labels = (draw.random(args.rows) < 1 / (1 + np.exp(-score))).astype(int).tolist()
    with args.path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "label", *known])
        writer.writerows(zip(range(args.rows), labels, *drawn.values(), strict=True))


if __name__ == "__main__":
    main()
