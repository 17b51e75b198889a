"""Recipe files with mistakes and nonsense in them: shown, or refused in one paragraph."""

import random

import pytest

NAMES = ("nvfp4", "mxfp4-backward", "fp8-blockwise")
PIECES = (
    *('"', "[", "]", "{", "}", "=", "0", "-1", "nan", "1e308", "true", '""', "[]", "\n", "#"),
    *('"\\u0000"', "9" * 20, "1979-05-27", '"none"', '"mxfp4"', '"mixed"', '"square"', '"fprop"'),
    *('"stochastic"', '"linear:*"', "first", "layers", "hadamard", "gain", "types", "rules"),
)


def damaged(draw, text):
    """The text with a word, some characters or a line changed, up to three times."""
    for _ in range(draw.randrange(1, 4)):
        separator = draw.choice((" ", "\n", ""))
        parts = text.split(separator) if separator else list(text)
        n = draw.randrange(len(parts) + 1)
        parts[n : n + draw.randrange(3)] = draw.choice(([], [draw.choice(PIECES)]))
        text = separator.join(parts)
    return text


def try_recipes(command_line, file, seeds):
    """The exit codes of showing a damaged recipe for each seed, as TOML and with a switch, too."""
    texts = [command_line("recipe", "show", name, "--toml")[1] for name in NAMES]
    codes = set()
    for seed in seeds:
        draw = random.Random(seed)
        file.write_text(damaged(draw, draw.choice(texts)))
        for words in ((), ("--toml",), ("--without", "hadamard")):
            code, _, err = command_line("recipe", "show", file, *words)
            assert code in (0, 2), seed
            assert code == 0 or err.startswith("mqo: "), (seed, err)
            codes.add(code)
    return codes


def test_a_damaged_recipe_is_no_traceback(command_line, tmp_path):
    assert try_recipes(command_line, tmp_path / "mine.toml", range(30)) == {0, 2}


@pytest.mark.heavy
def test_none_of_many_damaged_recipes_is_a_traceback(command_line, tmp_path):
    assert try_recipes(command_line, tmp_path / "mine.toml", range(2000)) == {0, 2}
