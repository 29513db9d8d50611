"""The embedded model has a drafter out of the box: it is found, it is small, it is shipped, and the target agrees with it."""

import tomllib
from pathlib import Path

import pytest

from engine.speculation.shipped import shipped_drafter
from frontend.text import load_text
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.bench.rounds import MeasuredEngine
from tests.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 12_000_000
LEAST_FIRST_ACCEPTANCE = 0.3  # under this a trained drafter is misaligned
QUESTIONS = ("What do bees do in winter?", "Write a short letter to a friend about a journey by train.")


def test_it_is_for_the_embedded_model_alone(tmp_path: Path) -> None:
    shipped = shipped_drafter("eagle3", resolve("embedded"))
    assert shipped is not None and sum(file.stat().st_size for file in shipped.path.iterdir()) < MOST_BYTES
    assert shipped_drafter("eagle3", resolve(str(write_tiny_model(tmp_path / "m")))) is None
    assert shipped_drafter("eagle3", None) is None
    assert shipped_drafter("medusa", resolve("embedded")) is None


def test_the_wheel_holds_it() -> None:
    shipped = shipped_drafter("eagle3", resolve("embedded"))
    assert shipped is not None
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folder = shipped.path.relative_to(ROOT)
    assert folder.parts[0] in wheel["packages"]
    assert f"{folder.parent.as_posix()}/**" in wheel["artifacts"]
    assert {file.name for file in shipped.path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.timeout(300)  # a few seconds on two free cores
def test_the_target_agrees_with_it() -> None:
    engine = MeasuredEngine(["--speculator", "eagle3", "--kv-cache-tokens", "2048", "--max-num-seqs", "2"])
    text = load_text(resolve("embedded"))
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    run = engine.run(prompts, SamplingParams(max_tokens=40, temperature=0.0), streams=2)
    assert run.after.draft_rounds > 20
    assert run.after.accepted_per_pos[0] / run.after.draft_rounds > LEAST_FIRST_ACCEPTANCE
