"""How a run quantises, beyond its types: the options of quant.toml that a user may choose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from mqo.errors import MqoError
from mqo.matrix.tables import ATTENTION_SITES, LINEAR_SITES, NONE, SITES, check_choice
from mqo.torch_free import formats

# Names that a schedule may have for all sites of a kind that are quantised.
GROUPS = {"linear": LINEAR_SITES["all"], "attention": ATTENTION_SITES}


class Quantiser(BaseModel):
    """The [quantiser] table; docs/formats.md says what each means. None is the quantisers' default.

    `seed` is the base of stochastic rounding's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    block: Literal[formats.BLOCK_SIZES] | None = None
    scale_rule: Literal[formats.SCALE_RULES] | None = None
    rounding: Literal[formats.ROUNDINGS] | None = None
    overflow: Literal[formats.OVERFLOWS] | None = None
    tensor_scale: bool | None = None
    seed: int | None = None
    cache_weights: bool | None = None
    save_activations: Literal[formats.SAVED_FORMS] | None = None


def choices(option: str) -> tuple[object, ...]:
    """The valid values of an option that has a list of them."""
    union = Quantiser.model_fields[option].annotation
    return get_args(get_args(union)[0])


def quant_toml(
    types: Mapping[str, str],
    *,
    quantiser: Quantiser | None = None,
    schedule: Iterable[str] = (),
    exclude: Iterable[str] = (),
    record_every: int | None = None,
    dump: Iterable[int] = (),
    run: Mapping[str, int | bool] | None = None,
) -> str:
    """quant.toml: the types of a run's source, for the guard to hold it to, and its options.

    Raises:
        MqoError: `schedule` names a site that does not exist, or twice, or a kind of which no site
            is quantised.
    """
    chosen = (quantiser or Quantiser()).model_dump(exclude_none=True)
    record = {"every": record_every} if record_every is not None else {}
    tables: dict[str, dict[str, object]] = {
        "asked": dict(types),
        "quantiser": chosen,
        "schedule": schedules(types, schedule),
        "layers": {"exclude": list(exclude)} if exclude else {},
        "record": record | ({"dump": list(dump)} if dump else {}),
        "run": dict(run or {}),
    }
    lines = ["# What this run quantises; its guard ends it when a site does not run so."]
    for name, table in tables.items():
        if table or name == "asked":
            # A string, a number, a list of strings in JSON is one in TOML, too.
            rows = (f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in table.items())
            lines += [f"[{name}]", *rows]
    return "\n".join(lines) + "\n"


def schedules(types: Mapping[str, str], given: Iterable[str]) -> dict[str, str]:
    """{site: schedule} of 'SITE: schedule' texts; raises what `quant_toml` raises."""
    found: dict[str, str] = {}
    for text in given:
        name, _, phases = (part.strip() for part in text.partition(":"))
        check_choice("GEMM site or kind of them", name, (*SITES, *GROUPS))
        sites = (name,)
        if name in GROUPS:
            sites = tuple(site for site in GROUPS[name] if types.get(site, NONE) != NONE)
        if not sites:
            raise MqoError(
                f"The schedule '{text}' is for no site, since no {name} one is quantised",
                help=f"Name the site itself, one of {', '.join(GROUPS[name])}, or another mode",
            )
        for site in sites:
            if site in found:
                raise MqoError(f"There are two schedules for {site}", expected="one a site")
            found[site] = phases
    return found
