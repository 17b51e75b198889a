"""Check the quantizers of a Python file, for `mqo plugin check`: this runs the file's code.

It writes JSON to the file that its second argument names: for each quantizer its name, whether it
passed, and its report as text, checks and times.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> None:
    """Check the quantizers of the file that the first argument names."""
    # Remove this folder from the path: its coverage.py would shadow the package that numba imports.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    args = parser().parse_args(argv)
    from mqo.megatron.run.errors import leave
    from mqo.quant.plugin_context import QuantizerError

    try:
        facts = checked(args.file)
    except QuantizerError as error:
        leave(error)
    args.target.write_text(json.dumps(facts), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("target", type=Path)
    return parser


def checked(file: Path) -> dict[str, Any]:
    """Return a report for each quantizer in the file."""
    from mqo.quant.plugin_check import check_file

    reports = check_file(file)
    return {
        "quantizers": [
            {
                "name": report.name,
                "passed": report.passed,
                "checks": [asdict(finding) for finding in report.findings],
                "ms_per_mb": report.ms_per_mb,
                "text": str(report),
            }
            for report in reports
        ]
    }


if __name__ == "__main__":
    main(sys.argv[1:])
