"""The reader of files from elsewhere, with its errors as those of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mqo.errors import MqoError
from mqo.torch_free import load

_reader = load("run.untrusted")
Limit, UntrustedFileError = _reader.Limit, _reader.UntrustedFileError
check_file, copy_file, open_file = _reader.check_file, _reader.copy_file, _reader.open_file
read_bytes, read_text, read_lines = _reader.read_bytes, _reader.read_text, _reader.read_lines
read_json, read_json_object = _reader.read_json, _reader.read_json_object
parse_json, read_safetensors_header = _reader.parse_json, _reader.read_safetensors_header
NoFileError, METADATA = _reader.NoFileError, _reader.METADATA
read_toml, read_yaml, sha256_of = _reader.read_toml, _reader.read_yaml, _reader.sha256_of
list_folder, walk_folders, shown = _reader.list_folder, _reader.walk_folders, _reader.shown
check_tokenizer = load("run.foreign_tokenizer").check_tokenizer


@contextmanager
def reading(error: type[MqoError], help: str = "") -> Iterator[None]:
    """Raise `error` for a file that the reader refuses."""
    try:
        yield
    except UntrustedFileError as refused:
        raise error(refused.found, expected=refused.expected, help=help) from refused
