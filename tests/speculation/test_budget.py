"""How many tokens a row may draft: never past max_tokens, the model, the step or what the drafter can honour."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.speculation.budget import DraftLimits, draft_budget, uses_any
from protocol.sampling import SamplingParams

LIMITS = DraftLimits(max_draft_len=5, max_model_len=128, unsupported_sampling=frozenset())


def budget(
    limits: DraftLimits = LIMITS, max_tokens: int = 100, num_tokens: int = 20, room: int = 1000, prompt: int = 10
) -> int:
    return draft_budget(limits, SamplingParams(max_tokens=max_tokens), num_tokens, prompt, room)


def test_width_is_the_most() -> None:
    assert budget() == 5
    assert budget(limits=DraftLimits(0, 128, frozenset())) == 0


@pytest.mark.parametrize(("max_tokens", "expected"), [(16, 5), (15, 4), (12, 1), (11, 0), (10, 0)])
def test_draft_and_bonus_fit_into_max_tokens(max_tokens: int, expected: int) -> None:
    assert budget(max_tokens=max_tokens) == expected  # ten are generated


@pytest.mark.parametrize(("num_tokens", "expected"), [(122, 5), (123, 4), (126, 1), (127, 0), (128, 0)])
def test_draft_and_bonus_fit_into_the_model(num_tokens: int, expected: int) -> None:
    assert budget(max_tokens=1000, num_tokens=num_tokens) == expected


@pytest.mark.parametrize(("room", "expected"), [(3, 3), (0, 0), (-2, 0)])
def test_draft_fits_into_the_step(room: int, expected: int) -> None:
    assert budget(room=room) == expected


def test_parameters_the_drafter_cannot_honour_switch_drafting_off() -> None:
    limits = DraftLimits(5, 128, frozenset({"min_p", "logprobs"}))
    assert draft_budget(limits, SamplingParams(max_tokens=50), 20, 10, 100) == 5
    assert draft_budget(limits, SamplingParams(max_tokens=50, min_p=0.1), 20, 10, 100) == 0
    assert draft_budget(limits, SamplingParams(max_tokens=50, logprobs=0), 20, 10, 100) == 0
    assert draft_budget(LIMITS, SamplingParams(max_tokens=50, min_p=0.1), 20, 10, 100) == 5


def test_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        uses_any(SamplingParams(max_tokens=1), frozenset({"min_q"}))


def test_policy_needs_no_torch() -> None:
    program = "import sys, engine.speculation.budget; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
