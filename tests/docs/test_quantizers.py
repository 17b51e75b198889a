"""The page on custom quantizers: its functions run, and pass their checks."""

import re

from mqo.project import Project
from mqo.quant.plugin_check import check_file

PAGE = Project.here().root / "docs/quantizers.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)


def test_the_quantizers_of_the_page_pass_their_checks(tmp_path):
    file = tmp_path / "page.py"
    file.write_text("\n".join(BLOCKS))
    reports = check_file(file)
    assert [report.name for report in reports] == ["mine", "held", "clipped", "centered"]
    assert [str(report) for report in reports if not report.passed] == []
