"""Key files: what is read, what is refused, and that a refusal never repeats a key."""

import logging
from pathlib import Path

import pytest

from protocol.curve_keys import (
    MAX_FILE_BYTES,
    ClientKeys,
    ServerKeys,
    check_curve_options,
    load_client_keys,
    load_server_keys,
    render,
)

SECRET, PUBLIC, OTHER = bytes(range(32)), b"\x23" * 32, b"\xff" * 32


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "own.key": render("secret", SECRET, "own"),
        "one.pub": render("public", PUBLIC, "one"),
        "two.pub": render("public", PUBLIC, "one") + "\n" + render("public", OTHER, "# two"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {name: str(tmp_path / name) for name in texts}


def test_an_engine_reads_its_secret_and_every_client(files):
    keys = load_server_keys(files["own.key"], files["two.pub"])
    assert (keys.secret, keys.clients) == (SECRET, frozenset({PUBLIC, OTHER}))


def test_a_frontend_reads_its_secret_and_one_server_key(files):
    keys = load_client_keys(files["own.key"], files["one.pub"])
    assert (keys.secret, keys.server) == (SECRET, PUBLIC)


def test_a_secret_is_in_no_repr():
    for keys in (ServerKeys(SECRET), ClientKeys(SECRET, PUBLIC)):
        assert SECRET.hex() not in repr(keys) and repr(SECRET) not in repr(keys)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (f"secret = {SECRET.hex()}\n", "is a secret key; this option takes public ones"),
        (f"public = {PUBLIC.hex()}\nsecret = {SECRET.hex()}\n", "line 2 of --curve-client-keys"),
        (f"public = {SECRET.hex()}00\n", "is no key"),
        (f"public {SECRET.hex()}\n", "is no key"),
        (SECRET.hex(), "is no key"),
        ("# nothing\n\n", "holds no key"),
        ("x" * (MAX_FILE_BYTES + 1), "larger than"),
        ("public = ä", "other than ASCII"),
    ],
)
def test_what_is_no_public_key_is_refused_without_repeating_it(files, tmp_path, content, sentence):
    path = tmp_path / "clients"
    path.write_text(content)
    with pytest.raises(ValueError, match=sentence) as refusal:
        load_server_keys(files["own.key"], str(path))
    assert SECRET.hex()[:16] not in str(refusal.value) and str(path) in str(refusal.value)


def test_a_missing_file_and_several_server_keys_are_refused(files, tmp_path):
    with pytest.raises(ValueError, match=r"--curve-key-file .* cannot be read: No such file"):
        load_client_keys(str(tmp_path / "none"), files["one.pub"])
    with pytest.raises(ValueError, match=r"--curve-server-key-file .* holds 2 keys; this option takes one"):
        load_client_keys(files["own.key"], files["two.pub"])


def test_a_secret_that_others_can_read_is_warned_of(files, caplog):
    with caplog.at_level(logging.WARNING):
        load_server_keys(files["own.key"], files["one.pub"])
        assert not caplog.records
        Path(files["own.key"]).chmod(0o644)
        load_server_keys(files["own.key"], files["one.pub"])
    assert "readable_by_others" in caplog.text and SECRET.hex() not in caplog.text


def test_half_of_curve_and_curve_over_ipc_are_refused_by_name():
    assert not check_curve_options(None, None, "--curve-client-keys", ["ipc:///x"])
    assert check_curve_options("a", "b", "--curve-client-keys", ["tcp://10.0.0.1:1"])
    with pytest.raises(ValueError, match="--curve-key-file works only together with --curve-client-keys"):
        check_curve_options("a", None, "--curve-client-keys", [])
    with pytest.raises(ValueError, match="--curve-client-keys works only together with --curve-key-file"):
        check_curve_options(None, "b", "--curve-client-keys", [])
    with pytest.raises(ValueError, match="says nothing about ipc:///x"):
        check_curve_options("a", "b", "--curve-client-keys", ["tcp://127.0.0.1:1", "ipc:///x"])
