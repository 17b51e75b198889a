"""Pack the weights of a folder that transformers loads, for `mqo export`.

    python Megatron-LM/tools/pack.py SOURCE TARGET FACTS [--type TYPE | --config QUANT_TOML]
        [--layout LAYOUT] [--hybrid]

SOURCE has config.json and safetensors; both are written to TARGET, which exists. A summary is
written to FACTS, as JSON, and a user-correctable error to the file that MQO_FAILURE names. With
--hybrid the names in QUANT_TOML are those of a HybridModel.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Pack a folder's weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "target", "facts"):
        parser.add_argument(name, type=Path)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--type")
    choice.add_argument("--config", type=Path)
    parser.add_argument("--layout")
    parser.add_argument("--hybrid", action="store_true")
    args = parser.parse_args()
    # Remove this folder from the path: numba would import its coverage.py as the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    from megatron.inference.packed.folder import write
    from mqo.megatron.run.errors import InferenceError, leave
    from mqo.megatron.run.untrusted import read_text
    from mqo.quant.config import parse

    try:
        config = parse(read_text(args.config)) if args.config else None
        chosen = {"quant_type": args.type, "config": config, "layout": args.layout}
        facts = write(args.source, args.target, **chosen, is_hybrid=args.hybrid)
    except (InferenceError, ValueError, OSError) as error:
        leave(error)
    args.facts.write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
