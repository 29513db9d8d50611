"""What is remembered of drafts: how often a position was drafted, and how often it was right when it was."""

import pytest

from engine.speculation.acceptance_memory import ROW_DECAY, Acceptance

W = 5
EVEN = [0.5] * W


def heard(memory: Acceptance, *rounds: tuple[int, int, int]) -> Acceptance:
    for allowed, judged, accepted in rounds:
        memory.hear(allowed, judged, accepted)
    return memory


def test_without_rounds_a_position_is_believed_to_be_as_everybodys() -> None:
    beliefs = [0.9, 0.8, 0.7, 0.6, 0.5]
    assert Acceptance(W, ROW_DECAY).accepted(beliefs) == pytest.approx(beliefs)
    assert Acceptance(W, ROW_DECAY).drafted(beliefs) == pytest.approx(beliefs)


def test_a_position_behind_the_first_rejection_learns_nothing() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), (5, 2, 1))
    accepted, drafted = memory.accepted(EVEN), memory.drafted(EVEN)
    assert accepted[0] > 0.5 > accepted[1] and accepted[2:] == EVEN[2:]
    assert drafted[0] == drafted[1] > 0.5 and drafted[2:] == EVEN[2:]


def test_a_draft_that_ended_early_says_so_of_the_next_position_only_and_nothing_of_acceptance() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), (5, 2, 2))
    assert memory.drafted(EVEN)[2] < 0.5 and memory.drafted(EVEN)[3:] == EVEN[3:]
    assert memory.accepted(EVEN)[2:] == EVEN[2:]
    ended = heard(Acceptance(W, ROW_DECAY), (2, 2, 2))
    assert ended.drafted(EVEN)[2] == 0.5, "what was not allowed says nothing"


def test_a_drafter_that_has_nothing_loses_no_good_name() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), *[(5, 5, 5)] * 50)
    before = memory.accepted(EVEN)
    heard(memory, *[(5, 0, 0)] * 50)
    assert memory.accepted(EVEN) == before
    assert memory.drafted(EVEN)[0] < 0.2


def test_many_rounds_outweigh_what_is_believed() -> None:
    assert heard(Acceptance(W, ROW_DECAY), *[(1, 1, 0)] * 90).accepted(EVEN)[0] < 0.1
    assert heard(Acceptance(W, ROW_DECAY), *[(5, 5, 5)] * 90).accepted(EVEN)[4] > 0.9


def test_a_position_that_is_not_tried_is_forgotten() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), *[(2, 2, 1)] * 90)
    before = memory.accepted(EVEN)[1]
    heard(memory, *[(1, 1, 1)] * 90)
    assert before < 0.1
    assert memory.accepted(EVEN)[1] == pytest.approx(0.5, abs=0.05)


def test_a_row_that_does_not_draft_forgets_its_bad_luck() -> None:
    memory = heard(Acceptance(W, ROW_DECAY), *[(1, 1, 0)] * 90)
    for _ in range(200):
        memory.fade()
    assert memory.accepted(EVEN)[0] == pytest.approx(0.5, abs=0.05)
