"""What the documents name exists: options, files, metric families, commands."""

import re
import shlex
from pathlib import Path

import pytest

from deploy.report import ReportConfig
from deploy.serve import options as serve_options
from engine.config import EngineConfig
from frontend.config import FrontendConfig
from frontend.families import FAMILIES
from protocol.options import OptionsError, parse, read, table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]+)")
OTHERS = re.compile(r"\b(?:docker|docker-compose|kubectl|kustomize) [^`\n]*")  # commands whose options are not ours
SOURCE_PATH = re.compile(r"`((?:engine|frontend|protocol|deploy|tests|tools)/[\w/]+\.(?:py|sh))`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?drafthouse (engine|frontend|serve|report) ?(.*)$", re.MULTILINE
)
CONFIGS = {"engine": EngineConfig, "frontend": FrontendConfig, "report": ReportConfig}


def known_flags() -> set[str]:
    roles = [table(EngineConfig), table(FrontendConfig), serve_options(), table(ReportConfig)]
    options = [option for role in roles for option in role.values()]
    trainer = re.findall(
        r'"(--[a-z-]+)"', (ROOT / "tools" / "train_drafter.py").read_text()
    )  # importing it loads torch
    return {option.flag for option in options} | {"--config", "--help", "--version", "--frontends", *trainer}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_option_a_document_names_exists(path: Path):
    named = {f"--{flag}" for flag in FLAG.findall(OTHERS.sub("", path.read_text()))}
    assert named - known_flags() == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_file_a_document_names_exists(path: Path):
    text = path.read_text()
    named = [ROOT / source for source in SOURCE_PATH.findall(text)] + [
        path.parent / link for link in LINK.findall(text)
    ]
    assert [str(file) for file in named if not file.exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_heading_a_document_links_to_exists(path: Path):
    linked = {(path.parent / target if target else path, anchor) for target, anchor in ANCHOR.findall(path.read_text())}
    assert [f"{target}#{anchor}" for target, anchor in linked if anchor not in anchors(target)] == []


def anchors(path: Path) -> set[str]:
    """What a renderer calls the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(role, arguments) of the lines that call drafthouse, in blocks of shell."""
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    return [(role, shlex.split(rest, comments=True)) for role, rest in COMMAND.findall(blocks)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_every_command_of_a_document_is_understood(path: Path):
    for role, arguments in commands(path.read_text()):
        if role == "serve":
            read(serve_options(), arguments, {}, program="drafthouse serve")
        else:
            parse(CONFIGS[role], arguments, {}, program=f"drafthouse {role}")


def test_commands_are_found_in_the_documents_and_a_wrong_one_is_refused():
    found = {role for path in DOCUMENTS for role, _ in commands(path.read_text())}
    assert found == {"engine", "frontend", "serve", "report"}
    [(role, arguments)] = commands("```\n.venv/bin/drafthouse engine \\\n  --port 1  # no option of an engine\n```\n")
    assert role == "engine" and arguments == ["--port", "1"]
    with pytest.raises(OptionsError, match="--port"):
        parse(EngineConfig, arguments, {}, program="drafthouse engine")


def test_the_table_of_engine_families_is_the_one_that_is_served():
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `((?:vllm|drafthouse):\w+)` \|", text, re.MULTILINE))
    assert listed == {name + ("_total" if family.kind == "counter" else "") for name, family in FAMILIES.items()}


def test_every_make_target_a_document_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for path in DOCUMENTS for target in re.findall(r"`?make ([a-z]+(?:-[a-z]+)*)", path.read_text())}
    assert named - targets - {"the", "it", "a"} == set()


def test_an_option_that_does_not_exist_is_found():
    assert {f"--{flag}" for flag in FLAG.findall("use --no-such-option")} - known_flags() == {"--no-such-option"}
