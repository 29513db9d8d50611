"""Admin keys: what a key file may hold, who is let in, and that keys are told to nobody."""

import logging
from pathlib import Path

import pytest

from frontend.admin import MAX_FILE_BYTES, AdminKeys, not_admin

KEY = "correct-horse-battery"
OTHER = "another-key-of-some-length"


def key_file(tmp_path: Path, content: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return str(path)


def test_every_key_of_the_file_is_let_in_and_comments_are_no_keys(tmp_path: Path):
    keys = AdminKeys.load(key_file(tmp_path, f"# {KEY}-comment\n\n  {KEY}  \r\n{OTHER}\n"))
    assert keys.allows(f"Bearer {KEY}") and keys.allows(f"Bearer {OTHER}")
    assert not keys.allows(f"Bearer # {KEY}-comment")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_may_be_written_in_any_case(tmp_path: Path, scheme: str):
    assert AdminKeys.load(key_file(tmp_path, KEY)).allows(f"{scheme} {KEY}")


@pytest.mark.parametrize(
    "header",
    [
        None, "", KEY, "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {KEY.upper()}",
        f"Bearer{KEY}", f"Bearer {KEY} {KEY}", "Bearer schl\u00fcssel-mit-umlaut", "Bearer \udcff\udcfe-not-utf-8", "Bearer \ud800",
    ],
)  # fmt: skip
def test_whoever_does_not_hold_a_key_is_not_let_in(tmp_path: Path, header: str | None):
    assert not AdminKeys.load(key_file(tmp_path, KEY)).allows(header)


def test_without_a_key_file_nobody_is_let_in():
    keys = AdminKeys.load(None)
    for header in (None, "", "Bearer", "Bearer ", f"Bearer {KEY}"):
        assert not keys.allows(header)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no key"),
        ("# only a comment\n\n", "holds no key"),
        ("fifteen-letters\n", "line 1 .* has 15 characters; a key has at least 16"),
        (f"{KEY}\ntwo words of it\n", "line 2 .* has 15 characters"),
        ("several words in a line\n", "holds a blank"),
        (f"{KEY}\x00\n", "control character"),
        ("schl\u00fcssel-mit-umlaut\n", "other than ASCII"),
        (b"\xff" * 32, "other than ASCII"),
        ("x" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_is_not_all_keys_is_refused_without_repeating_them(
    tmp_path: Path, content: str | bytes, sentence: str
):
    with pytest.raises(ValueError, match=sentence) as refusal:
        AdminKeys.load(key_file(tmp_path, content))
    assert KEY not in str(refusal.value) and "fifteen" not in str(refusal.value)


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"--admin-key-file {path} cannot be read"):
            AdminKeys.load(str(path))


def test_a_file_that_others_can_read_is_warned_of_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        keys = AdminKeys.load(key_file(tmp_path, KEY, mode=0o644))
    assert keys.allows(f"Bearer {KEY}")
    assert "admin_key_file_readable_by_others" in caplog.text and KEY not in caplog.text


def test_a_private_file_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        AdminKeys.load(key_file(tmp_path, KEY, mode=0o640))
    assert caplog.records == []


def test_keys_are_in_no_representation(tmp_path: Path):
    keys = AdminKeys.load(key_file(tmp_path, KEY))
    assert KEY not in repr(keys) and KEY not in str(vars(keys))


def test_every_key_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []

    def compare(given: bytes, own: bytes) -> bool:
        compared.append(own)
        return given == own

    monkeypatch.setattr("frontend.admin.hmac.compare_digest", compare)
    keys = AdminKeys.load(key_file(tmp_path, f"{KEY}\n{OTHER}\n"))
    for header in (f"Bearer {KEY}", f"Bearer {OTHER}", "Bearer neither", None):
        compared.clear()
        keys.allows(header)
        assert len(set(compared)) == 2
    assert len({len(digest) for digest in compared}) == 1


def test_the_refusal_says_what_to_do():
    assert "--admin-key-file" in not_admin(None).message and not_admin(None).status == 401
    assert "Bearer" in not_admin("/etc/keys").message and "/etc/keys" not in not_admin("/etc/keys").message
