"""A drafter that is read wrongly is noticed after 200 drafts, once, and one that is read rightly never is."""

import logging

import pytest
import torch

from engine.speculation.first_token_watch import NUM_DRAFTS, FirstTokenWatch
from engine.speculation.speculator import CommittedSpan, DraftRow
from protocol.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=9)
HISTORY = [1, 2, 3]
ROOT = len(HISTORY) - 1


def drafted(watch: FirstTokenWatch, *candidates: int) -> None:
    watch.proposed([DraftRow(4, HISTORY, 5, 1, PARAMS)], torch.tensor([candidates], dtype=torch.int32))


def committed(watch: FirstTokenWatch, token: int, accepted: tuple[int, ...] = ()) -> None:
    """The round committed the root, `accepted`, and `token` behind it."""
    watch.observe([CommittedSpan(4, ROOT, [3, *accepted], token, (0,), None)])


def run(watch: FirstTokenWatch, num_right: int, num_drafts: int = NUM_DRAFTS) -> None:
    for number in range(num_drafts):
        drafted(watch, 7)
        committed(watch, 9, (7,)) if number < num_right else committed(watch, 8)


def test_drafts_that_are_never_right_are_reported_once_with_what_to_suspect(caplog: pytest.LogCaptureFixture) -> None:
    watch = FirstTokenWatch("eagle3", "the taps (--eagle-taps)")
    run(watch, 5, NUM_DRAFTS - 1)
    assert not caplog.records
    run(watch, 0, 300)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("speculator=eagle3", "first_accepted=5 drafts=200", "--eagle-taps"):
        assert part in record.getMessage()


def test_three_in_a_hundred_are_enough(caplog: pytest.LogCaptureFixture) -> None:
    watch = FirstTokenWatch("eagle3", "")
    run(watch, 6)
    run(watch, 0, 1000)
    assert not caplog.records


def test_any_child_of_the_root_counts_and_padding_never_does(caplog: pytest.LogCaptureFixture) -> None:
    watch = FirstTokenWatch("eagle", "")
    for _ in range(NUM_DRAFTS):
        drafted(watch, -1, 5, 6)
        committed(watch, 6)
    assert not caplog.records


def test_only_what_was_committed_behind_the_same_root_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    watch = FirstTokenWatch("eagle", "")
    for _ in range(NUM_DRAFTS):
        drafted(watch, 7)
        watch.forget(4)  # the row was preempted
        committed(watch, 8)
        drafted(watch, 7)
        watch.observe([CommittedSpan(4, 0, [1], 2, (0,), None)])  # another sequence's prompt
    run(watch, NUM_DRAFTS)
    assert not caplog.records
