"""The page on custom quantizers: its functions and that of README run, and pass their checks."""

import re

from mqo.project import Project
from mqo.quant.plugin_check import check_file

ROOT = Project.here().root
PAGES = [ROOT / "README.md", ROOT / "docs/quantizers.md"]
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)


def test_the_quantizers_of_the_page_pass_their_checks(tmp_path):
    file = tmp_path / "page.py"
    file.write_text("\n".join(BLOCKS))
    reports = check_file(file)
    assert [report.name for report in reports] == ["mine", "held", "clipped", "centered"]
    assert [str(report) for report in reports if not report.passed] == []
