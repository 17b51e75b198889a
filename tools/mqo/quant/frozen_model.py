"""The base of tables that are read from files; needs pydantic."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A frozen model without extra keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
