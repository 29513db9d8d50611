"""One error object, whoever answers: the frontends, and the balancer before them when none of them can."""

import json
import re
from pathlib import Path

import pytest

from frontend.errors import ApiError, overloaded

ROOT = Path(__file__).resolve().parents[2]
BALANCER = (ROOT / "deploy/compose/haproxy.cfg").read_text()
ANSWERS = re.findall(
    r"^ +http-error status (\d+) content-type (\S+) string '([^']*)'( hdr .*)?$", BALANCER, re.MULTILINE
)


def test_the_balancer_answers_for_all_that_it_finds_missing():
    assert [int(status) for status, *_ in ANSWERS] == [502, 503, 504]


@pytest.mark.parametrize(("status", "kind", "body", "headers"), ANSWERS, ids=[status for status, *_ in ANSWERS])
def test_the_balancers_errors_are_spelled_as_a_frontend_would(status, kind, body, headers):
    message = json.loads(body)["error"]["message"]
    assert body.encode() == ApiError(int(status), message).body()
    assert kind == "application/json"
    assert len(message) > 20


def test_the_balancers_503_is_that_of_a_lost_engine():
    [(body, headers)] = [(body, headers) for status, _, body, headers in ANSWERS if status == "503"]
    ours = overloaded("the engine was lost: it was killed")
    assert {**json.loads(body)["error"], "message": ours.message} == json.loads(ours.body())["error"]
    assert headers.split() == ["hdr", "Retry-After", str(ours.retry_after_s)]


def test_the_documented_types_are_those_that_are_sent():
    text = (ROOT / "docs/api.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)` \|", text, re.MULTILINE)
    told = {int(status): kind for statuses, kind in rows for status in statuses.split(",")}
    assert told == {status: ApiError(status, "x").kind for status in told}
    assert {400, 401, 404, 405, 413, 415, 429, 500, 502, 503, 504} == told.keys()
