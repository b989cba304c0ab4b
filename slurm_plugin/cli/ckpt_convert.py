"""`hetstream ckpt convert`: checkpoints from one format to another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetstream.base.errors import OptionsError
from hetstream.base.installed import install_command
from hetstream.base.text import printable, size_words
from hetstream.checkpoint.disk.isolated_read import read_apart
from hetstream.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from hetstream.checkpoint.convert.dcp import Source

# Those of `convert/dcp.py`, which needs torch; a parser does not.
KINDS = ("flash", "dcp", "torch", "safetensors")

EPILOG = """\
SRC is recognised by what is in it: a directory of checkpoints, or one checkpoint in it; a directory of
torch.distributed.checkpoint (dcp); a file of torch.save; a safetensors file.

  --to dcp          what plain torch.distributed.checkpoint.load reads, on any number of ranks
  --to torch        one file for torch.load(..., weights_only=True): the state, nested as it was
  --to safetensors  one file of all tensors, by their names in the state
  --to flash        one more checkpoint in the directory DST, newer than all there, as FlashCheckpointer restores it

Sharded tensors become whole. Of values that each rank has for itself, those of rank 0 are taken. No code in SRC is run.
Exit codes: 0 done, 1 SRC is damaged, missing or cannot be held by DST, 2 the command line is wrong.

examples:
  hetstream ckpt convert checkpoints model.pt --to torch              the newest checkpoint
  hetstream ckpt convert --step 1200 checkpoints dcp --to dcp
  hetstream ckpt convert old_dcp checkpoints --to flash --as-step 1200
"""


def add_ckpt_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Turn checkpoints into other formats, and others into checkpoints."
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, metavar="SRC", help="what to convert")
    parser.add_argument("target", type=Path, metavar="DST", help="what to make of it; must not exist, except for flash")
    parser.add_argument("--to", required=True, choices=KINDS, help="format of DST")
    parser.add_argument("--step", type=int, metavar="N", help="of which step (default: the newest)")
    parser.add_argument("--as-step", type=int, metavar="N", help="flash: which step DST is of, if SRC does not say")
    parser.add_argument("--under", metavar="KEY", help="put all of SRC under this key, e.g. model")
    parser.add_argument("--dry-run", action="store_true", help="read SRC and say what would be written")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, or say what would be."""
    from hetstream.checkpoint.convert.dcp import check_target, detect

    source = detect(args.source)
    _check_options(args, source)
    check_target(args.target, args.to)
    done = read_apart(source.path, lambda: _convert(source, args))
    done = {"source": str(args.source), "from": source.kind, "to": args.to, "dry_run": args.dry_run, **done}
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "conversion": done}, indent=1))
        return 0
    verb = "would write" if args.dry_run else "wrote"
    print(printable(f"{verb} {done['target']}: {done['what']}, from {args.source} ({source.kind})"))
    for note in done["notes"]:
        print(f"note: {printable(note)}", file=sys.stderr)
    return 0


def _check_options(args: argparse.Namespace, source: Source) -> None:
    """Refuse options that would change nothing, all at once."""
    rules = (
        ("step", source.kind == "flash", f"SRC is {source.kind}, which has no steps to choose from"),
        ("as_step", args.to == "flash", "only with --to flash"),
    )
    problems = [
        f"--{name.replace('_', '-')}={getattr(args, name)}: {rule}"
        for name, is_right, rule in rules
        if getattr(args, name) is not None and not is_right
    ]
    if (args.as_step or 0) < 0:
        problems.append(f"--as-step={args.as_step}: a step is 0 or more")
    if args.under == "":
        problems.append("--under: a key has at least one letter")
    if problems:
        raise OptionsError("; ".join(problems))


def _convert(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    try:
        from hetstream.checkpoint.convert.weights import check_step, reading, write
    except ImportError as error:
        raise CheckpointError(f"this conversion needs torch: {install_command('torch')} ({error})") from error
    with reading(source, args.step, args.under or "") as content:
        check_step(content, args.to, args.as_step)
        tensors = content.tensors
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        keys = ", ".join(content.state)
        what = f"{len(tensors)} tensor(s), {size_words(num_bytes)}, under {keys[:200]}"
        target = args.target
        if not args.dry_run:
            target = write(content, args.to, target, step=args.as_step)
        return {"target": str(target), "what": what, "num_tensors": len(tensors), "notes": content.notes}
