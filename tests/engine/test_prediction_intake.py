"""The engine judges a prediction itself: its frontend may not have."""

import msgspec
import pytest

from engine.intake import PolicySettings, refusal
from protocol.messages import Capacity
from protocol.reasons import RejectReason
from tests.fakes import submit

CAPACITY = Capacity(
    max_model_len=40, max_num_seqs=4, max_num_batched_tokens=32, block_size=4, num_blocks=8, max_num_queued_requests=9,
    max_num_queued_tokens=999, prefix_caching=True,
)  # fmt: skip
TAKES = PolicySettings(CAPACITY, 4, 100, frozenset({2}), takes_predictions=True)
LONGEST = 32  # 8 blocks of 4


def asked(prediction: tuple[int, ...]):
    return msgspec.structs.replace(submit(1), prediction_token_ids=prediction)


@pytest.mark.parametrize("prediction", [(), (5,), (0, 99), (7,) * LONGEST])
def test_a_prediction_that_could_be_an_answer_is_taken(prediction: tuple[int, ...]) -> None:
    assert refusal(asked(prediction), TAKES) is None


@pytest.mark.parametrize(
    ("prediction", "sentence"),
    [
        ((7,) * (LONGEST + 1), "prediction has 33 tokens; the limit is 32"),
        ((5, 100), "outside the vocabulary of 0 to 99"),
        ((-1, 5), "outside the vocabulary of 0 to 99"),
    ],
)
def test_any_other_is_refused_with_a_sentence(prediction: tuple[int, ...], sentence: str) -> None:
    finish = refusal(asked(prediction), TAKES)
    assert finish is not None and finish.rejected is RejectReason.INVALID
    assert sentence in (finish.message or "")


def test_an_engine_without_a_drafter_for_it_says_so() -> None:
    settings = PolicySettings(CAPACITY, 4, 100, frozenset({2}))
    finish = refusal(asked((5,)), settings)
    assert finish is not None and "--speculator first_of:prediction,ngram" in (finish.message or "")
    assert refusal(asked(()), settings) is None
