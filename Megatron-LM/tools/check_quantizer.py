"""Check the quantizers of a Python file, for `mqo plugin check`: this runs the file's code."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mqo.quant.plugin_check import check_file


def check(file: Path) -> list[dict[str, Any]]:
    """Return the name of each quantizer, whether it passed, its report as text, checks, times."""
    return [
        {
            "name": report.name,
            "passed": report.passed,
            "checks": [asdict(finding) for finding in report.findings],
            "ms_per_mb": report.ms_per_mb,
            "text": str(report),
        }
        for report in check_file(file)
    ]
