"""How far long work is: on a terminal of our own, and on a log, by a clock of our own."""

import io

import pytest
from mqo.display import EVERY_S, Count, Display, Rate, duration
from rich.console import Console


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


def terminal(width=80):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def drawn(console):
    """The lines as they were drawn, one on the other, without what moves the cursor."""
    import re

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


def test_a_log_gets_a_line_a_minute_and_what_stays_at_once(said, clock):
    display = Display(said.append, now=clock)
    with display.live():
        for clock.seconds in range(0, 3 * EVERY_S + 1, 10):
            display.show(f"after {clock.seconds} s")
        display("done")
    assert said == ["after 60 s", "after 120 s", "after 180 s", "done"]


def test_a_log_does_not_get_a_line_twice(said, clock):
    display = Display(said.append, now=clock)
    display("step 160/160")
    clock.seconds = EVERY_S
    display.show("step 160/160")  # while the last step is validated
    display.show("another")
    assert said == ["step 160/160", "another"]


def test_a_terminal_gets_a_line_that_is_drawn_anew_and_goes_away(said, clock):
    console = terminal()
    display = Display(said.append, console, clock)
    display("before")
    with display.live():
        display.show("one")
        clock.seconds = 0.1
        display.show("too soon to be seen")
        clock.seconds = 1
        display("stays")
        display.show("two")
    display("after")
    assert said == ["before", "after"]
    assert [line for line in drawn(console) if line.strip()][:2] == ["one", "stays"]
    assert "two" in drawn(console)
    assert "too soon" not in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")  # the line is cleared


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_line_is_never_wider_than_the_terminal_nor_than_80_columns(clock, width):
    console = terminal(width)
    display = Display(console=console, now=clock)
    with display.live():
        display.show("x" * 300)
    assert max(map(len, drawn(console))) < min(width, 80)


def test_a_terminal_that_cannot_move_its_cursor_is_a_log(said, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    display = Display(said.append, console, clock)
    with display.live():
        clock.seconds = EVERY_S
        display.show("far")
    assert (said, console.file.getvalue()) == (["far"], "")


def test_what_says_lines_becomes_a_display_and_a_display_stays_one(said):
    display = Display.around(said.append)
    assert Display.around(display) is display
    display("a line")
    assert said == ["a line"]


def test_a_stream_that_is_no_terminal_gets_lines(clock):
    stream = io.StringIO()
    display = Display.on(stream)
    with display.live():
        display.show("too soon")
        display("a line")
    assert stream.getvalue() == "a line\n"


def test_the_speed_is_that_of_the_last_minute_and_not_of_the_start(clock):
    rate = Rate(clock)
    assert (rate.per_s, rate.seconds_left(100)) == (None, None)
    rate.add(0)
    assert rate.per_s is None
    for clock.seconds in range(601, 701):  # it takes ten minutes before anything happens
        rate.add(10 * (clock.seconds - 600))
    assert rate.per_s == 10
    clock.seconds += 5
    rate.add(1000)
    assert rate.per_s == 10  # not slower because the next one is still to come
    assert rate.seconds_left(2000) == 100


def test_a_count_is_shown_with_its_speed_and_the_time_left(said, clock):
    count = Count(Display(said.append, now=clock), "  1 of 2  bf16", clock)
    count.show(("tokens", 0, 1_000_000))
    clock.seconds = 60
    count.show(("tokens", 60_000, 1_000_000))
    assert said == ["  1 of 2  bf16  60,000/1,000,000 tokens  1,000 tokens/s  15:40 left"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (547, "9:07"), (7500, "2:05:00"), (273_600, "3d 04h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
