"""Chunks of losses in a size of a test's choice."""

import pytest
from mqo.megatron.losses import chunks


@pytest.fixture
def in_chunks(monkeypatch):
    """A function that sets the largest number of elements in a chunk."""

    def limit(elements):
        monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", elements)
        return elements

    return limit
