"""The former name of `codemod`: patches written for earlier versions import it."""

from mqo.overlay.codemod import Codemod as Sweep
from mqo.overlay.codemod import Source, Splice

__all__ = ["Source", "Splice", "Sweep"]
