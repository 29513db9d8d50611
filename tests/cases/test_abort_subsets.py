"""ABORT-5: random parts of a batch leave all the time, with min_tokens, seeds and log-probs among them, and others stay.

Source: torch-spyre/sendnn-inference#492, an index error in the sampler.
"""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cases.client import IS_LONG, PAT, Client, together, total
from tests.cases.crowd import Answer, OpenRequest, answers, assert_same, leave_all, seeded
from tests.cases.laws import increments, labelled
from tests.cases.processes import unharmed, wait_until

WIDTH = 5
NUM_STAYING, NUM_LEAVING = 8, 8  # together the 16 streams of the case
STORM_S = 20.0 if IS_LONG else 3.0
MIN_TOKENS = 50
ABANDONED = "drafthouse:requests_abandoned_total"


def mixed_bodies(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Half greedy, half sampled with min_tokens, a seed and log-probs; every prompt another one."""
    bodies: list[dict[str, Any]] = []
    for index in range(count):
        body = {"prompt": f"{index}: {PAT}", "temperature": 0, "max_tokens": 80}
        if index % 2:
            body |= {"temperature": 0.8, "seed": rng.randrange(2**31), "min_tokens": MIN_TOKENS, "logprobs": 2}
        bodies.append(body)
    return bodies


def keep_leaving(client: Client, rng: random.Random, until: float) -> int:
    """Streams of the same kinds: every 100 ms a random subset leaves and as many others come. How many left."""
    bodies, opened, num_left = mixed_bodies(rng, 16), list[OpenRequest](), 0
    while time.monotonic() < until:
        for _ in range(NUM_LEAVING - len(opened)):
            body = {**rng.choice(bodies), "max_tokens": 6000, "ignore_eos": True, "stream": True}
            opened.append(OpenRequest(client, body))
        time.sleep(0.1)
        leaving = rng.sample(opened, rng.randint(1, len(opened)))
        leave_all(leaving)
        opened = [one for one in opened if one not in leaving]
        num_left += len(leaving)
    leave_all(opened)
    return num_left + len(opened)


def keep_asking(client: Client, body: dict[str, Any], until: float) -> list[Answer]:
    got = answers(client, [body], width=1)
    while time.monotonic() < until:
        got += answers(client, [body], width=1)
    return got


def num_left(samples: dict[str, float]) -> float:
    """Clients that left, at whatever stage of their request."""
    return labelled(samples, "vllm:request_success_total", finished_reason="abort") + total(samples, ABANDONED)


def assert_as_alone(got: Sequence[Answer], alone: Answer) -> None:
    assert_same(got, [alone] * len(got))
    for one in got:
        if one.token_ids == alone.token_ids:  # with the log-probs of its own row; fp32 differs by the batch's shape
            assert one.gaps == pytest.approx(alone.gaps, abs=0.01)


def test_abort_5_the_survivors_of_random_cancels_answer_as_alone(ref: Client, spec: Client) -> None:
    rng = seeded("ABORT-5")
    staying = mixed_bodies(rng, NUM_STAYING)
    alone = answers(ref, staying, width=1)
    left: list[int] = []
    with unharmed(spec):
        before = spec.metrics()
        until = time.monotonic() + STORM_S
        storm = threading.Thread(target=lambda: left.append(keep_leaving(spec, rng, until)))
        storm.start()
        got = together([lambda body=body: keep_asking(spec, body, until) for body in staying], width=NUM_STAYING)
        storm.join()
        wait_until(lambda: num_left(spec.metrics()) - num_left(before) == left[0], 5, "everyone who left is counted")
        spec.assert_quiet(within_s=3.0 if IS_LONG else 2.0)
        after = spec.metrics()
    assert increments(before, after, WIDTH).speculation.accepted > 0
    assert total(after, ABANDONED) - total(before, ABANDONED) <= left[0] / 10, "nearly all of them ran"
    for body, mine, reference in zip(staying, got, alone, strict=True):
        assert len(reference.token_ids) >= body.get("min_tokens", 0)
        assert_as_alone(mine, reference)
