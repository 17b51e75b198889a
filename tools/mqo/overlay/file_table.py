"""The table of patched files in Megatron-LM/README.md."""

from __future__ import annotations

from mqo.overlay.records import Manifest


def file_table(manifest: Manifest) -> str:
    """Return a Markdown table of the files that patches change, one row per list of patches.

    The row with the most files is the last one.
    """
    files: dict[tuple[str, ...], list[str]] = {}
    for path, file in sorted(manifest.files.items()):
        files.setdefault(tuple(name for name, _ in file.stages), []).append(f"`{path}`")
    rows = sorted(files.items(), key=lambda row: len(row[1]) == max(map(len, files.values())))
    lines = ["| files | patches |", "|---|---|"]
    for names, paths in rows:
        patches = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {'<br>'.join(paths)} | {patches} |")
    return "\n".join(lines) + "\n"
