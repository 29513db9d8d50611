"""The start-up profile over a tiny model: it measures what runs, stays in its limits and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.construction import BuiltExecutor, ExecutorSettings, build_executor
from engine.speculation.recipe import SpeculationSettings
from protocol.model_files import resolve
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("profile") / "target", seed=5, num_layers=1)


def built(model: Path, speculator: str, profile_tokens: int, kv_tokens: int = 400) -> BuiltExecutor:
    settings = ExecutorSettings(
        dtype="fp32", device="cpu", kv_cache_tokens=kv_tokens, block_size=4, max_num_seqs=5, speculator=speculator,
        speculation=SpeculationSettings(draft_model=str(model), num_draft_tokens=3), profile_tokens=profile_tokens,
    )  # fmt: skip
    return build_executor(resolve(str(model)), settings)


@pytest.mark.parametrize("speculator", ["ngram", "draft_model"])
def test_rows_and_tokens_that_fit_are_measured(model: Path, speculator: str) -> None:
    costs = built(model, speculator, profile_tokens=12).start_up_costs
    assert costs is not None
    assert costs.verify.rows == (1, 4)
    assert [[slots for slots, _ in line] for line in costs.verify.lines] == [[1, 2, 4], [4, 8]], "12 tokens at most"
    assert all(took > 1000 for line in costs.verify.lines for _, took in line)
    is_measured = speculator == "draft_model"
    assert ([[slots for slots, _ in line] for line in costs.draft.lines] == [[1, 3], [4]]) == is_measured


def test_no_row_is_left_behind(model: Path) -> None:
    executor = built(model, "draft_model", profile_tokens=64).executor
    assert not executor._rows._rows and not executor._broken


@pytest.mark.parametrize(
    ("speculator", "tokens", "kv_tokens"), [("none", 64, 400), ("ngram", 0, 400), ("ngram", 64, 5)]
)
def test_nothing_is_measured_where_nothing_is_drafted_asked_or_fits(
    model: Path, speculator: str, tokens: int, kv_tokens: int
) -> None:
    assert built(model, speculator, tokens, kv_tokens).start_up_costs is None
