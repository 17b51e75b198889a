"""Which paragraphs and documents count as seen before."""

import pytest

pytest.importorskip("datasketch")
from mqo.data.distinct import Distinct

LONG = "The miller of the valley grinds the barley of all his neighbors before the day ends, "
WORDS = [f"word{n}" for n in range(300)]


@pytest.fixture
def distinct():
    return Distinct()


def test_a_long_paragraph_stays_once(distinct):
    assert distinct.new_paragraphs(f"{LONG}a\n\n{LONG}b\n \n{LONG}a") == f"{LONG}a\n\n{LONG}b"
    assert distinct.new_paragraphs(f"Of a\n\n{LONG}a\n\n{LONG}c") == f"Of a\n\n{LONG}c"


def test_a_short_paragraph_may_repeat(distinct):
    assert distinct.new_paragraphs("Options\n\nOptions") == "Options\n\nOptions"


def test_documents_that_differ_in_a_few_words_are_near_duplicates(distinct):
    assert not distinct.is_near_duplicate("a", " ".join(WORDS))
    assert distinct.is_near_duplicate("b", " ".join([*WORDS[:150], "other", *WORDS[151:]]))
    assert distinct.is_near_duplicate("c", "  ".join(WORDS).upper())


def test_documents_that_share_half_of_their_text_are_kept(distinct):
    assert not distinct.is_near_duplicate("a", " ".join(WORDS))
    assert not distinct.is_near_duplicate("b", " ".join([*WORDS[:150], *WORDS[:150:-1]]))


def test_texts_shorter_than_a_shingle_are_compared(distinct):
    assert not distinct.is_near_duplicate("a", "two words")
    assert distinct.is_near_duplicate("b", "Two words")
    assert not distinct.is_near_duplicate("c", "")
