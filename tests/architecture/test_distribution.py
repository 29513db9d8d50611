"""The order of the tests on several workers names files that exist."""

from pathlib import Path

from tests.distribution import names

ROOT = Path(__file__).resolve().parents[2]


def test_files_that_run_first_or_together_exist() -> None:
    assert [name for name in names() if not (ROOT / name).is_file()] == []
