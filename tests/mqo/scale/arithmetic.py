"""The arithmetic of a mode that quantizes linear layers only in fprop."""

from mqo.matrix.tables import NONE
from mqo.scale.memory import WIDTH, Arithmetic


def of_mode(mode, dtype="bf16"):
    copies = WIDTH[dtype] * (mode.linear != NONE)
    return Arithmetic(mode.linear, copies, "fused" if mode.pv == NONE else "chunked")
