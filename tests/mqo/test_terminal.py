"""How a command ends: its errors as one paragraph and an exit code."""

import errno
import json
import math
from pathlib import Path

import pytest
from mqo.terminal import emit, guarded


def ended(command, capsys):
    """The exit code of a command, and what it printed to stderr."""
    with pytest.raises(SystemExit) as left:
        guarded(command)
    return left.value.code, capsys.readouterr().err


def test_a_full_disk_is_one_paragraph(capsys):
    def write():
        Path("/dev/full").write_text("content")  # the error of a write names no file

    code, said = ended(write, capsys)
    assert code == 2
    assert said.startswith("mqo: A disk is full. ")
    assert said.count("\n") == 1


def test_the_folder_of_a_file_that_has_no_room_is_named(capsys, tmp_path):
    def write():
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "gone" / "file"))

    assert f"The disk of {tmp_path}/gone is full" in ended(write, capsys)[1]


def test_a_file_that_cannot_be_read_is_one_paragraph(capsys, tmp_path):
    code, said = ended(tmp_path.read_bytes, capsys)
    assert code == 2
    assert said.startswith(f"mqo: {tmp_path} cannot be used: Is a directory. ")
    assert said.count("\n") == 1


def test_an_error_of_the_system_that_names_no_file_is_no_users(tmp_path):
    def fail():
        raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(OSError, match="Bad file"):
        guarded(fail)


def test_a_name_that_is_no_text_is_printed(capfd):
    guarded(lambda: print("name\udcff"))
    assert capfd.readouterr().out == "name\\udcff\n"


def test_json_has_no_number_that_is_none_and_no_bytes(capsys):
    emit("x", None, "", True, loss=math.nan, most=math.inf, at=Path("a"), held=({1: b"\xff"}, 2.5))
    table = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (table["loss"], table["most"], table["at"]) == ("nan", "inf", "a")
    assert table["held"] == [{"1": "\\xff"}, 2.5]
