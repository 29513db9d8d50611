"""A request with a parameter its drafter cannot honour is answered as without one, and counted as plain decoding.

Every other request of the same batches goes on drafting: a public server crashed on penalties beside drafts.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.speculation.budget import uses_any
from protocol.messages import Round
from tests.inprocess import InProcessEngine
from tests.lossless import SCENARIOS, Plain, assert_equal, check_books, oracle_drafter, play
from tests.tiny import write_tiny_model

PENALTIES = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_requests_a_drafter_cannot_honour_run_without_drafts_and_are_counted_as_plain(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "target", seed=5)
    plain = Plain(directory)
    scenario = SCENARIOS["mixed"](plain)
    drafter = oracle_drafter(scenario, plain, is_right=True)
    assert drafter.oracle is not None
    drafter.oracle.capabilities = replace(drafter.oracle.capabilities, unsupported_sampling=PENALTIES)
    engine = InProcessEngine(directory, scenario.shape, drafter)
    play(engine, scenario)
    answers, outputs = engine.answers(), engine.outputs()
    check_books(engine, scenario, answers)
    plainly: list[Round] = []
    num_refused = num_drafted_for = 0
    for one in scenario.submits:
        assert_equal(one, plain.answer(one), answers[one.request_id, 0])
        rounds = [output.round for output in outputs[one.request_id, 0] if output.round is not None]
        plainly += [each for each in rounds if not each.drafted]
        if uses_any(one.sampling, PENALTIES):
            assert rounds and not any(each.drafted for each in rounds), one.sampling
            num_refused += 1
        else:
            num_drafted_for += any(each.drafted for each in rounds)
    assert engine.counters.plain_rounds == len(plainly)
    assert num_refused >= 4 and num_drafted_for >= 8
