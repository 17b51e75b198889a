"""What the tests of runs share: published shapes, and files of quantizers that must not be run."""

import pytest
from mqo.matrix import tables
from mqo.matrix.tables import Shape


def published_shape(model):
    """The sizes of a published model."""
    fields = {name: getattr(tables.models()[model], name) for name in Shape.model_fields}
    return Shape(**fields)


@pytest.fixture
def write_quantizers(tmp_path):
    """A function that writes a file of quantizers, which no test may run."""
    marker = tmp_path / "it ran"

    def write(*functions, path="a folder/mine.py", head=""):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        run = f"open({str(marker)!r}, 'w')\nfrom mqo.quant import quantizer\n"
        file.write_text(f"{run}{head}{''.join(functions)}")
        return file

    yield write
    assert not marker.exists()
