"""The elements of OCP's formats."""

from mqo.quant.formats import FORMATS

MX_ELEMENTS = {name: row.element for name, row in FORMATS.items() if row.is_mx}
