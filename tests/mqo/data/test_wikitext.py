"""What cleaning keeps of an article and what it drops."""

import pytest
from mqo.data.wikitext import clean


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("The '''mill''' is ''old''.", "The mill is old."),
        ("A mill{{citation needed|date=May}} turns.", "A mill turns."),
        ("{{Infobox|name=Mill|size={{small|big}}}}\nA mill turns.", "A mill turns."),
        ("It lifts {{convert|12|kg|lb}} of flour.", "It lifts 12 kg of flour."),
        ("A mill.<ref>Page 3 of a book.</ref> It turns.<ref name=a />", "A mill. It turns."),
        ("The [[mill]] by the [[river|brook]].", "The mill by the brook."),
        ("Seen at [[mill#wheel]].", "Seen at mill wheel."),
        ("[[CSI: Miller]] is a play.", "CSI: Miller is a play."),
        ("A mill.[[File:Mill.png|thumb|A [[mill]] seen from above.]]", "A mill."),
        ("A mill.\n[[Category:Mills]]\n[[fr:Moulin]]", "A mill."),
        ("See [urn:mill the mill's page].", "See the mill's page."),
        ("A mill.<!-- is it? --> It turns.", "A mill. It turns."),
        ("Flour &amp; bread&nbsp;rolls.", "Flour & bread rolls."),
        ("Its area is <math>a^2</math>, in short.", "Its area is, in short."),
        ("H<sub>2</sub>O drives it.<br/>It turns.", "H2O drives it.\nIt turns."),
        ("__NOTOC__\nA mill turns.", "A mill turns."),
        ("A mill ({{lang-fr|moulin}}, ; ) turns.", "A mill turns."),
        ("A mill ({{IPA|x}}, from French) turns.", "A mill (from French) turns."),
        ("", ""),
        ("{{stub}}\n[[Category:Mills]]", ""),
    ],
)
def test_inline_markup(wikitext, text):
    assert clean(wikitext) == text


def test_a_table_goes_and_its_surroundings_stay():
    table = '{| class="wikitable"\n|+ Mills\n! Name !! Year\n|-\n| Upper || 1712\n|}'
    assert clean(f"Before.\n{table}\nAfter.") == "Before.\n\nAfter."


def test_rows_of_a_table_opened_by_a_template_go_too():
    assert clean("Before.\n{{mill table}}\n|-\n| Upper\n|}\nAfter.") == "Before.\n\nAfter."


def test_list_items_stand_on_lines_of_their_own():
    assert clean("Grains:\n* barley\n* rye\n# oats").split() == ["Grains:", "barley", "rye", "oats"]
    assert "barley\n" in clean("Grains:\n* barley\n* rye")


def test_headings_stay_above_prose_at_any_depth():
    text = clean("Lead.\n== History ==\n=== Early ===\nIt was built.\n== Use ==\nIt grinds.")
    assert text == "Lead.\n\nHistory\n\nEarly\n\nIt was built.\n\nUse\n\nIt grinds."


def test_headings_without_prose_below_go():
    assert clean("Lead.\n== Pictures ==\n{{gallery}}\n== Use ==\nIt grinds.") == (
        "Lead.\n\nUse\n\nIt grinds."
    )


def test_sections_of_sources_go_with_their_subsections():
    wikitext = "Lead.\n== References ==\nA book.\n=== Old ===\nA scroll.\n== Use ==\nIt grinds."
    assert clean(wikitext) == "Lead.\n\nUse\n\nIt grinds."


def test_paragraphs_stay_apart_by_one_empty_line():
    assert clean("One.\n\n\n\nTwo.") == "One.\n\nTwo."
