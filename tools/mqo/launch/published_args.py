"""Check that config.json can express a checkpoint's arguments, before the model is published.

mqo/megatron/run/checkpoint_args.toml lists every argument. An argument that config.json cannot
express must be at upstream's default, or else the published folder would describe another model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mqo.errors import ConvertError
from mqo.megatron.run import args_table
from mqo.megatron.run.gpt_blocks import FRESH, PATTERN, given_pattern

table, IGNORE_FLAG = args_table.read_table, args_table.IGNORE_FLAG


def check_published(
    args: Mapping[str, Any],
    parser: Mapping[str, Mapping[str, Any]],
    ignored: Collection[str] = (),
) -> None:
    """Raise ConvertError if config.json cannot express a checkpoint's arguments.

    `parser` has the `flag` and the `default` of the vendored release's arguments, by name.
    `ignored` are names outside of it that the user accepts.
    """
    rows = table()
    try:
        unknown = args_table.unknown_arguments(args, ignored)
    except ValueError as error:
        raise ConvertError(str(error), expected="the name of an unknown argument") from error
    if unknown:
        raise ConvertError(
            f"The checkpoint was trained with {unknown[0]} = {args[unknown[0]]!r:.80}",
            expected="arguments that this release of Megatron knows",
            help=f"If the model does not depend on it, pass {IGNORE_FLAG} {unknown[0]}",
        )
    attention = "latent" if args.get("multi_latent_attention") else "grouped"
    listed = {**rows.values["all"], **rows.values[attention]}
    if FRESH in (given_pattern(args) or ""):
        listed |= {**rows.values["mamba"], PATTERN: (args[PATTERN],)}
    for name, value in args.items():
        if name in listed:
            # Upstream stores several types of load balancing as a list.
            parts = value if isinstance(value, list) else [value]
            fits = all(part in listed[name] for part in parts)
            allowed = " or ".join(map(repr, listed[name]))
        elif name in rows.refused and name in parser:
            default = parser[name]["default"]
            fits, allowed = value == default, repr(default)
        elif name in rows.refused:
            fits, allowed = args_table.is_empty(value), "no value"
        else:
            continue
        if not fits:
            flag = f"{parser[name]['flag']}: " if name in parser else ""
            raise ConvertError(
                f"The checkpoint was trained with {flag}{name} = {value!r:.80}",
                expected=f"{name} = {allowed}: config.json cannot express other values",
                help="`mqo eval` and `mqo generate` run the checkpoint as it is",
            )
