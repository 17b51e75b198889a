"""Name the damaged file of the index cache when the datasets cannot be built.

Megatron keeps three arrays of each dataset (.npy) and its error names none of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqo.megatron.run.untrusted import UntrustedFileError, check_npy, list_folder

_BESIDE_DATA = Path("cache", "GPTDataset_indices")  # without --data-cache-path


class IndexCacheError(RuntimeError):
    """An array in the index cache is damaged."""


@contextmanager
def naming_damage(cache: str | None, prefixes: list[str]) -> Iterator[None]:
    """Raise IndexCacheError if the block fails, and an array of the cache is damaged.

    Args:
        cache: --data-cache-path.
        prefixes: of the data; each has its own cache without --data-cache-path.
    """
    try:
        yield
    except Exception as error:
        folders = [Path(cache)] if cache else [Path(prefix) / _BESIDE_DATA for prefix in prefixes]
        for path in (path for folder in folders if folder.is_dir() for path in list_folder(folder)):
            if path.suffix == ".npy" and (fault := _fault(path)):
                raise IndexCacheError(f"{fault}. Remove it: the next run rebuilds it") from error
        raise


def _fault(path: Path) -> str | None:
    try:
        check_npy(path)
    except UntrustedFileError as error:
        return f"{error.found}. Expected: {error.expected}"
    return None
