"""The table of patched files in Megatron-LM/README.md."""

from __future__ import annotations

from mqo.overlay.records import Manifest


def file_table(manifest: Manifest) -> str:
    """Return a Markdown table of the files that patches change, with the names of the patches."""
    lines = ["| file | patches |", "|---|---|"]
    for path, file in sorted(manifest.files.items()):
        names = ", ".join(f"`{name}`" for name, _ in file.stages)
        lines.append(f"| `{path}` | {names} |")
    return "\n".join(lines) + "\n"
