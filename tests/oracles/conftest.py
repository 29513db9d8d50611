"""The oracles: implementations nobody here wrote, which live in an environment of their own (`make oracles`).

Owns when these tests run: elsewhere they are skipped with a sentence and not even imported; in `.venv-oracles` nothing may
be skipped, so that a package which fails to import cannot pass for parity.
"""

import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
import torch

ENVIRONMENT = ".venv-oracles"
IS_HERE = Path(sys.prefix).name == ENVIRONMENT

if IS_HERE:
    # Read when vLLM and the Hugging Face packages are imported: no network, no plugins that patch vLLM, no news.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")


def pytest_configure(config: pytest.Config) -> None:
    if IS_HERE:  # their deprecations are not ours to fix; ours still end the test
        for line in ("default", *(f"error:::{package}" for package in ("engine", "protocol", "tests"))):
            config.addinivalue_line("filterwarnings", line)


class _Elsewhere(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(f"compares with packages that only {ENVIRONMENT} has: make oracles", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if IS_HERE else _Elsewhere.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if IS_HERE and report.skipped:
        report.outcome, report.longrepr = "failed", _reproach(report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_HERE and report.skipped:
        report.outcome, report.longrepr = "failed", _reproach(report.longrepr)
    return report


def _reproach(reason: object) -> str:
    return f"nothing may be skipped in {ENVIRONMENT}: {reason}"


@pytest.fixture(autouse=True)
def one_thread() -> Generator[None, None, None]:
    """Matrices this small lose more to waking threads than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
