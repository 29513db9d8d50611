"""Log-probabilities that wait for their answer: not a bit is lost, and what they take is known in advance."""

import gc
import random
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from frontend.app import build_app
from frontend.choices import Choice, TextSettings
from frontend.packed_logprobs import PackedLogprobs, TokenEntries, TokenEntry, most_bytes
from frontend.streams import MOST_AT_ONCE, Stream
from protocol.messages import SequenceOutput, TokenLogprobs
from tests.frontend.embedded import embedded_tokenizer
from tests.frontend.fakes_client import FakeEngineClient, server_over

SEED = 20261130
NUM_TOKENS = 300


def any_logprobs(rng: random.Random) -> TokenLogprobs | None:
    count = rng.choice((0, 1, 5, 20))
    values = [rng.choice((-rng.expovariate(0.1), -0.0, -1e-300, float("-inf"), -1.5)) for _ in range(count + 1)]
    tops = tuple(rng.choice((0, 2**31 - 1, rng.randrange(2**31))) for _ in range(count))
    return rng.choice((None, TokenLogprobs(values[0], rng.choice((1, 2**31 - 1)), tops, tuple(values[1:]))))


def test_every_number_comes_back_as_it_was() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for length in (0, 1, 2, 20, 200):
        given = [any_logprobs(rng) for _ in range(length)]
        packed = PackedLogprobs(given)
        assert (list(packed), len(packed)) == (given, length)
        entries = TokenEntries()
        for number, one in enumerate(given):
            entries.append(number + 7, one, number * 3)
        assert list(entries) == [TokenEntry(number + 7, one, number * 3) for number, one in enumerate(given)]
        assert len(entries) == length


def encoded(index: int, num_alternatives: int) -> bytes:
    """One step's token with alternatives, as it comes over the wire."""
    tops = tuple(1000 + (index * 31 + rank) % 40_000 for rank in range(num_alternatives))
    values = tuple(-1.0 - index - rank for rank in range(num_alternatives))
    given = TokenLogprobs(-0.5 - index, 1 + index, tops, values)
    return msgspec.msgpack.encode(SequenceOutput(1, 0, index, (582 + index % 8,), (given,), None, None, (), None))


def decoded(payload: bytes) -> SequenceOutput:
    return msgspec.msgpack.decode(payload, type=SequenceOutput)


def bytes_per_token(take: Callable[[SequenceOutput], object], num_alternatives: int) -> float:
    """What is held of each output that was taken, the first one apart."""
    payloads = [encoded(index, num_alternatives) for index in range(NUM_TOKENS + 1)]
    take(decoded(payloads[0]))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for payload in payloads[1:]:
        take(decoded(payload))
    gc.collect()  # empties the interpreter's store of tuples that were freed
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held / NUM_TOKENS


def bytes_as_objects(num_alternatives: int) -> float:
    kept: list[SequenceOutput] = []
    return bytes_per_token(kept.append, num_alternatives)


@pytest.mark.parametrize("num_alternatives", [0, 5, 20])
def test_a_waiting_token_takes_what_admission_counts_with(num_alternatives: int) -> None:
    unasked = Choice(0, embedded_tokenizer(), TextSettings((), False, True, 0, wants_logprobs=False))
    asked = Choice(0, embedded_tokenizer(), TextSettings((), False, True, 0, wants_logprobs=True))
    taken = bytes_per_token(asked.push, num_alternatives) - bytes_per_token(unasked.push, 0)
    most = most_bytes(1, num_alternatives)
    assert most * 0.9 < taken < most * 1.125, "arrays that grow have room for some more"
    assert taken < bytes_as_objects(num_alternatives) / 3


def test_a_prompt_waits_as_packed() -> None:
    packed = PackedLogprobs()
    taken = bytes_per_token(lambda output: packed.append((output.logprobs or (None,))[0]), 20)
    assert taken < most_bytes(1, 20) * 1.125
    assert len(packed) == NUM_TOKENS + 1


async def test_outputs_that_wait_behind_others_wait_as_they_were_on_the_wire() -> None:
    """A client that reads too slowly: its handler waits for it, and nobody takes the outputs."""
    stream = Stream(1, 1, awaits_close=False, send_close=lambda *close: None)
    assert bytes_per_token(stream.accept, 20) < bytes_as_objects(20) / 4
    handed_out = [await stream.next(), await stream.next()]
    assert [len(part) for part in handed_out] == [MOST_AT_ONCE, NUM_TOKENS + 1 - MOST_AT_ONCE], "not all at once"
    assert handed_out[0] + handed_out[1] == [decoded(encoded(index, 20)) for index in range(NUM_TOKENS + 1)]


# ---- and the answers in flight together have a bound ----

BODY = {"prompt": "x", "logprobs": 5}
ONE_MIB = {"max_inflight_logprobs_mib": 1, "max_inflight_requests": 1000}


async def test_beyond_the_limit_requests_are_refused_by_what_they_may_come_to_and_others_run() -> None:
    engine = FakeEngineClient()
    engine.autoplay = False
    server = server_over(engine, **ONE_MIB)
    server.admission.logprob_bytes = (1 << 20) - most_bytes(100, 5)  # of answers in flight
    async with TestClient(TestServer(build_app(server))) as http:
        async with http.post("/v1/completions", json={**BODY, "max_tokens": 101}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"], response.headers["Retry-After"]) == (503, "overloaded_error", "1")
            assert "log-probabilities" in error["message"] and "max_tokens" in error["message"]
        assert not engine.submitted
        engine.autoplay = True
        for body in ({"prompt": "x", "max_tokens": 101}, {**BODY, "max_tokens": 100}):
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
        page = await (await http.get("/metrics/frontend")).text()
        assert 'reason="max_inflight_logprobs"} 1\n' in page
    assert server.admission.logprob_bytes == (1 << 20) - most_bytes(100, 5), "given back"


@pytest.mark.parametrize(
    ("body", "num_bytes"),
    [
        ({"logprobs": 5, "max_tokens": 10}, 10 * (24 + 5 * 12)),
        ({"logprobs": 0, "max_tokens": 10, "n": 3}, 3 * 10 * 24),
        ({"logprobs": 1, "max_tokens": 10, "echo": True, "prompt": [7] * 4}, 10 * 36 + 4 * 36),
        ({"logprobs": 2, "max_tokens": 5, "prompt": ["x", "y"]}, 2 * 5 * 48),
        ({"prompt_logprobs": 20, "max_tokens": 5, "prompt": [7] * 3}, 3 * 264),
        ({"max_tokens": 100}, 0),
    ],
)
async def test_a_request_reserves_what_its_log_probabilities_can_take(body: dict[str, object], num_bytes: int) -> None:
    seen = []
    engine = FakeEngineClient()
    server = server_over(engine, **ONE_MIB)
    submit = engine.submit

    def watch(*arguments: object, **options: object) -> Stream:
        seen.append(server.admission.logprob_bytes)
        return submit(*arguments, **options)  # type: ignore[arg-type]

    engine.submit = watch  # type: ignore[method-assign, assignment]
    async with (
        TestClient(TestServer(build_app(server))) as http,
        http.post("/v1/completions", json={"prompt": "x", **body}) as response,
    ):
        assert response.status == 200, await response.text()
    assert set(seen) == {num_bytes} and server.admission.logprob_bytes == 0
