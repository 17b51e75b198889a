"""Read untrusted files; the reader's errors can become those of a command."""

from mqo.megatron.run.errors import reading as reading
from mqo.megatron.run.foreign_tokenizer import check_tokenizer as check_tokenizer
from mqo.megatron.run.untrusted import METADATA as METADATA
from mqo.megatron.run.untrusted import Limit as Limit
from mqo.megatron.run.untrusted import NoFileError as NoFileError
from mqo.megatron.run.untrusted import UntrustedFileError as UntrustedFileError
from mqo.megatron.run.untrusted import check_file as check_file
from mqo.megatron.run.untrusted import copy_file as copy_file
from mqo.megatron.run.untrusted import list_folder as list_folder
from mqo.megatron.run.untrusted import open_file as open_file
from mqo.megatron.run.untrusted import parse_json as parse_json
from mqo.megatron.run.untrusted import read_bytes as read_bytes
from mqo.megatron.run.untrusted import read_json as read_json
from mqo.megatron.run.untrusted import read_json_object as read_json_object
from mqo.megatron.run.untrusted import read_lines as read_lines
from mqo.megatron.run.untrusted import read_safetensors_header as read_safetensors_header
from mqo.megatron.run.untrusted import read_text as read_text
from mqo.megatron.run.untrusted import read_toml as read_toml
from mqo.megatron.run.untrusted import read_yaml as read_yaml
from mqo.megatron.run.untrusted import sha256_of as sha256_of
from mqo.megatron.run.untrusted import shown as shown
from mqo.megatron.run.untrusted import walk_folders as walk_folders
