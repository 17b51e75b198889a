"""The elements of OCP's formats, and the rules of their scales."""

from mqo.quant.formats import FORMATS, SCALE_RULES_OF

MX_ELEMENTS = {name: row.element for name, row in FORMATS.items() if row.is_mx}
MX_RULES = SCALE_RULES_OF["e8m0"]
