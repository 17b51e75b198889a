"""Measure the SQNR of formats on 2^20 values of N(0, 1), for `mqo formats`.

Writes JSON to the file that the last argument names: {"sqnr_db": {format: dB}}.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHAPE, SEED = (256, 4096), 1234


def main(argv: list[str]) -> None:
    """Measure the formats that the first arguments name; --own has those of a user."""
    # Remove this folder from the path: its coverage.py would shadow the package that numba imports.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    args = parser().parse_args(argv)
    import torch
    from mqo.quant import sqnr
    from mqo.quant.own_formats import declare_rows

    declare_rows(args.own)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED))
    facts = {name: sqnr(x, name) for name in args.formats}
    args.target.write_text(json.dumps({"sqnr_db": facts}), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="+")
    parser.add_argument("target", type=Path)
    parser.add_argument("--own", default="{}", help="JSON of {name: row of quant.toml}")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
