"""Options: precedence, one sentence for every mistake, and what the roles declare."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from protocol.options import HelpRequested, OptionsError, as_flags, build, parse, read, show, table


class Example(msgspec.Struct, frozen=True, kw_only=True):
    size: Annotated[int, Meta(ge=1, le=10, description="how big")] = 3
    limit: Annotated[int | None, Meta(ge=1, description="how many at most")] = None
    ratio: Annotated[float, Meta(description="share")] = 0.5
    kind: Annotated[Literal["red", "green"], Meta(description="colour")] = "red"
    is_on: Annotated[bool, Meta(description="switch")] = False
    first_name: Annotated[str, Meta(description="who")] = "x"

    def __post_init__(self) -> None:
        if self.size > 5 and self.kind == "green":
            raise ValueError("--size above 5 is not possible with --kind green")

    def check_given(self, given: frozenset[str]) -> None:
        if "ratio" in given and not self.is_on:
            raise ValueError("--ratio works only with --is-on")


def options(*arguments: str, **environment: str) -> Example:
    return parse(Example, arguments, environment, program="example")


def mistake(*arguments: str, **environment: str) -> str:
    with pytest.raises(OptionsError) as caught:
        options(*arguments, **environment)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_defaults_are_those_of_the_struct():
    assert options() == Example()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path):
    file = tmp_path / "options.toml"
    file.write_text('size = 4\nfirst_name = "file"\nlimit = 7\n')
    got = options("--config", str(file), "--size", "6", DRAFTHOUSE_SIZE="5", DRAFTHOUSE_FIRST_NAME="environment")
    assert (got.size, got.first_name, got.limit) == (6, "environment", 7)
    assert options(DRAFTHOUSE_CONFIG=str(file)).size == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--size=7",), {"size": 7}),
        (("--is-on",), {"is_on": True}),
        (("--is-on", "--size", "2"), {"is_on": True, "size": 2}),
        (("--is-on", "false"), {"is_on": False}),
        (("--first-name", "-5"), {"first_name": "-5"}),
        (("--first-name=--odd=name",), {"first_name": "--odd=name"}),
        (("--limit", "9", "--kind", "green"), {"limit": 9, "kind": "green"}),
    ],
)
def test_ways_to_write_a_flag(arguments: tuple[str, ...], expected: dict[str, object]):
    got = options(*arguments)
    assert {name: getattr(got, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--colour", "red"), "no option --colour"),
        (("--sise", "3"), "did you mean --size"),
        (("--first_name", "x"), "no option --first_name"),
        (("--size",), "--size needs a value"),
        (("--size", "--is-on"), "--size needs a value"),
        (("--size", "many"), "--size: expected int, got 'many'"),
        (("--size", ""), "--size"),
        (("--size", "0"), "--size: expected int >= 1, got '0'"),
        (("--size", "2.5"), "--size"),
        (("--limit", "0"), "--limit: expected int >= 1, got '0'"),
        (("--kind", "blue"), "expected one of red, green"),
        (("--is-on", "maybe"), "--is-on"),
        (("--ratio", "nan", "--is-on"), "--ratio: expected a finite number"),
        (("--ratio", "inf", "--is-on"), "--ratio: expected a finite number"),
        (("--size", "2", "--size", "3"), "--size is given twice"),
        (("serve",), "unexpected argument 'serve'"),
        (("--", "x"), "unexpected argument '--'"),
        (("--ratio", "0.1"), "--ratio works only with --is-on"),
        (("--size", "6", "--kind", "green"), "not possible with --kind green"),
    ],
)
def test_a_wrong_flag_gives_one_sentence_naming_it(arguments: tuple[str, ...], words: str):
    assert words in mistake(*arguments)


def test_wrong_environment_gives_one_sentence_naming_it():
    assert "DRAFTHOUSE_SIZE: expected int, got 'many'" in mistake(DRAFTHOUSE_SIZE="many")
    assert "DRAFTHOUSE_SISE is no option of example; did you mean DRAFTHOUSE_SIZE?" in mistake(DRAFTHOUSE_SISE="3")
    assert options(OTHER_SIZE="many") == Example()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("sise = 3", "'sise' in"),
        ("size = ", "is not valid TOML"),
        ('size = "3x"', "size in"),
        ("size = 99", "expected int <= 10, got 99"),
        ("size = true", "size in"),
        ("[size]\nx = 1", "size in"),
        ("ratio = nan\nis_on = true", "finite"),
        ("first_name = 3", "expected str, got 3"),
    ],
)
def test_a_wrong_file_gives_one_sentence_naming_it(tmp_path: Path, content: str, words: str):
    file = tmp_path / "options.toml"
    file.write_text(content)
    sentence = mistake("--config", str(file))
    assert words in sentence and str(file) in sentence


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    assert "No such file" in mistake("--config", str(tmp_path / "none.toml"))
    assert "Is a directory" in mistake("--config", str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in mistake("--config", str(tmp_path / "bytes"))


def test_help_names_every_option_with_its_default():
    with pytest.raises(HelpRequested) as caught:
        options("--help")
    text = str(caught.value)
    for words in ("--size N", "how big (default 3)", "--kind red|green", "--is-on true|false", "--config FILE"):
        assert words in text


def test_flags_of_given_values_say_the_same_again():
    arguments = ["--size", "7", "--is-on", "--ratio", "0.25", "--first-name", "a b", "--limit", "3"]
    given = read(table(Example), arguments, {}, program="example")
    assert build(Example, read(table(Example), as_flags(given), {}, program="example")) == options(*arguments)


def test_one_line_shows_every_value():
    assert show(Example()) == "size=3 limit=None ratio=0.5 kind=red is_on=false first_name=x"


def test_a_required_option_is_asked_for():
    class Required(msgspec.Struct, frozen=True):
        path: Annotated[str, Meta(description="where")]

    with pytest.raises(OptionsError, match="--path is required"):
        parse(Required, [], {}, program="example")


@pytest.mark.parametrize("role", ["serve", "engine", "frontend"])
def test_a_role_ends_with_code_2_and_one_sentence(role: str):
    ended = subprocess.run(
        [sys.executable, "-m", "deploy.launcher", role, "--no-such-option", "1"], capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr == f"drafthouse {role}: there is no option --no-such-option\n"
