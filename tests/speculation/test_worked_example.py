"""The drafter that docs/speculators.md shows how to add, added as it says, in a copy of the tree: tested there, and served."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.servers import clean_environment, serve
from tests.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "speculators.md"
NAME = "bigram"
MAX_LINES = 60
COPIED = ("protocol", "engine", "frontend", "deploy", "tests", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "shipped_drafters", "images")
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDED_LINE = re.compile(r"^\| `([\w/]+\.py)` \| `?(\w+)`? \| `([^`]+)`[^|]* \|$", re.MULTILINE)
# Of the tests that run over the registry's table: all of the seam, and the engine with everything happening at once.
CHOSEN = f"engine_modules_import or test_registry or ({NAME} and (test_conformance or cramped))"
FILES = (
    "tests/architecture/test_architecture.py",
    "tests/speculation/test_registry.py",
    "tests/speculation/test_conformance.py",
    "tests/engine/test_lossless.py",
)


def code() -> str:
    [block] = CODE.findall(DOCUMENT.read_text())
    return str(block)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product with the example in it."""
    root = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, root / name)
    (root / "engine" / "speculation" / f"{NAME}.py").write_text(code())
    added = ADDED_LINE.findall(DOCUMENT.read_text())
    assert len(added) == 4, added
    for path, table, line in added:
        add(root / path, table, line)
    return root


def add(path: Path, table: str, line: str) -> None:
    """Put `line` where the document says: before the table's entry of the n-gram drafter, or among the imports."""
    text = path.read_text()
    if table == "imports":
        path.write_text(text.replace("\nfrom engine.", f"\n{line}\nfrom engine.", 1))
        return
    [start] = [match.start() for match in re.finditer(rf"^{table}\b", text, re.MULTILINE)]
    entry = re.compile(r'^( +)"ngram"', re.MULTILINE).search(text, start)
    assert entry is not None, f"{path} has no table {table}"
    path.write_text(f"{text[: entry.start()]}{entry[1]}{line}\n{text[entry.start() :]}")


def test_the_example_is_short_and_written_as_everything_else(tree: Path) -> None:
    assert code().count("\n") <= MAX_LINES
    path = str(tree / "engine" / "speculation" / f"{NAME}.py")
    for words in (("check",), ("format", "--check")):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", path], cwd=tree, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(300)
def test_the_example_passes_the_tests_that_run_over_the_table(tree: Path) -> None:
    words = ["-v", "-p", "no:cacheprovider", "-k", CHOSEN, *FILES]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tree, capture_output=True, text=True, env=clean_environment()
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    passed = [line for line in ended.stdout.splitlines() if NAME in line and "PASSED" in line]
    assert any("test_lossless" in line for line in passed) and len(passed) > 5, passed


@pytest.mark.timeout(300)
def test_the_example_drafts_for_a_client(tree: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    options = ("--kv-cache-tokens", "512", "--device", "cpu", "--dtype", "fp32")
    with serve("--model", str(model), "--speculator", NAME, *options, root=tree) as server:
        ask = {"prompt": [40, 41, 40, 41, 40, 41], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        # Greedy over two tokens: a text that soon repeats itself, so there is something to draft.
        ask["allowed_token_ids"] = [40, 41]
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions", json.dumps(ask).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 30
        with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=60) as response:
            page = response.read().decode()
    accepted = re.search(rf'^drafthouse:spec_accepted_tokens_by_source_total{{.*source="{NAME}".*}} (\d+)', page, re.M)
    assert accepted is not None and int(accepted[1]) > 0
