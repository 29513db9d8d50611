"""An engine that contradicts itself is refused by name before a page or a limit is built from what it says."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from frontend.attachment import Attachment, Expectation, Lost
from frontend.hello_check import MAX_DRAFT_LEN, contradiction
from protocol.codec import encode_counters
from protocol.counters import Counters
from protocol.messages import Hello
from tests.frontend.fakes_client import hello


@dataclass
class Case:
    says: str
    change: Callable[[], dict[str, object]]


def capacity(**changes: int) -> dict[str, object]:
    return {"capacity": msgspec.structs.replace(hello().capacity, **changes)}


def counters(max_draft_len: int = 5, num_sources: int = 1, short: str | None = None) -> dict[str, object]:
    zero = Counters.zero(max_draft_len, num_sources)
    if short is not None:
        getattr(zero, short).counts.pop()
    return {"counters": encode_counters(zero)}


CASES = [
    Case("its totals are none", lambda: {"counters": msgspec.Raw(b"\xc0")}),
    Case("its totals are none", lambda: {"counters": msgspec.Raw(b"\x93\x01\x02\x03")}),
    Case("accepted_per_pos has 3 entries where 5 belong", lambda: counters(max_draft_len=3)),
    Case("draft_tokens_by_source has 7 entries where 1 belong", lambda: counters(num_sources=7)),
    Case("step_seconds has 16 entries where 17 belong", lambda: counters(short="step_seconds")),
    Case("its id is 'x", lambda: {"engine_id": 'x"} 1\nother{a="b'}),
    Case("its id is 'xxx", lambda: {"engine_id": "x" * 1_000_000}),
    Case("its model is called", lambda: {"model_name": "a b"}),
    Case("its max_model_len is 0", lambda: capacity(max_model_len=0)),
    Case("its block_size is -1", lambda: capacity(block_size=-1)),
    Case("its max_num_queued_requests is -9", lambda: capacity(max_num_queued_requests=-9)),
    Case("its epoch is -1", lambda: {"epoch": -1}),
    Case("its step -1", lambda: {"step_id": -1}),
    Case(f"it drafts {MAX_DRAFT_LEN + 1} tokens", lambda: {"max_draft_len": MAX_DRAFT_LEN + 1}),
    Case("from 65 sources", lambda: {"sources": ("a",) * 65}),
]


@pytest.mark.parametrize("case", CASES, ids=[case.says for case in CASES])
def test_a_hello_that_cannot_be_true_is_refused_and_observed_by_nobody(case: Case):
    seen: list[object] = []
    attachment = Attachment(seen.append, Expectation(None, None))
    with pytest.raises(Lost, match="the engine contradicts itself: ") as refused:
        attachment.apply(msgspec.structs.replace(hello(), **case.change()))
    assert case.says in str(refused.value) and len(str(refused.value)) < 300
    assert seen == [] and attachment.hello is None and attachment.mismatch == str(refused.value)


@pytest.mark.parametrize("sound", [hello(), hello(max_draft_len=0), hello(max_draft_len=64)])
def test_a_sound_hello_is_taken(sound: Hello):
    assert contradiction(sound) is None
    attachment = Attachment(lambda _: None, Expectation(None, None))
    attachment.apply(sound)
    assert attachment.hello is sound


def test_an_engine_that_takes_no_queue_is_sound():
    assert contradiction(msgspec.structs.replace(hello(), **capacity(max_num_queued_requests=0))) is None
