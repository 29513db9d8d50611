"""Engine-scope numbers are exact through any frontend, after the last byte of any stream."""

import json
import time
import urllib.request

from tests.e2e.servers import fleet
from tests.timing import at_most_s

SERIES = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


def post(base_url: str, **body: object) -> dict[str, object]:
    data = json.dumps({"prompt": "x", **body}).encode()
    request = urllib.request.Request(base_url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def stream_to_the_last_byte(base_url: str, **body: object) -> int:
    """Read a stream to its end of file; returns its completion tokens."""
    data = json.dumps({"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, **body}).encode()
    request = urllib.request.Request(base_url + "/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        lines = [line for line in response.read().decode().splitlines() if line.startswith("data: {")]
    return int(json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"])


def scrape(base_url: str, path: str = "/metrics") -> dict[str, float]:
    with urllib.request.urlopen(base_url + path, timeout=10) as response:
        lines = response.read().decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, value in samples}


def total(samples: dict[str, float], family: str) -> float:
    return sum(value for name, value in samples.items() if name == family or name.startswith(family + "{"))


def test_a_scrape_through_another_frontend_shows_the_last_byte_of_any_stream():
    with fleet(3, "--executor", "sim", "--check-laws") as urls:
        expected = 0
        for turn in range(60):
            expected += stream_to_the_last_byte(urls[turn % 3], max_tokens=3 + turn % 5)
            samples = scrape(urls[(turn + 1) % 3])
            assert total(samples, "vllm:generation_tokens_total") == expected, f"turn {turn}"
            assert total(samples, "drafthouse:fence_timeouts_total") == 0


def test_trimmed_tokens_are_counted_before_the_stream_ends():
    with fleet(2, "--executor", "sim", "--num-draft-tokens", "5", "--check-laws") as urls:
        for turn in range(1, 21):
            script = {"runs": [[582, 827, 1296, 1876, 2531, 2976]]}
            tokens = stream_to_the_last_byte(urls[0], max_tokens=64, stop=[" three"], sim=script)
            samples = scrape(urls[1])
            generated = total(samples, "vllm:generation_tokens_total")
            assert generated - total(samples, "drafthouse:stop_trimmed_tokens_total") == turn * tokens


def test_every_frontend_agrees_on_the_engine_also_one_that_came_late():
    with fleet(2, "--executor", "sim", "--check-laws") as urls:
        for turn in range(10):
            post(urls[0], max_tokens=4 + turn)
        first, second = (scrape(url) for url in urls)
        for family in SERIES:
            assert total(first, family) == total(second, family)
        assert total(first, "vllm:generation_tokens_total") == sum(4 + turn for turn in range(10))


def test_a_scrape_is_answered_at_once_while_a_long_step_runs():
    with fleet(2, "--executor", "sim", "--sim-step-ms", "1500") as urls:
        data = json.dumps({"prompt": "x", "max_tokens": 50, "stream": True}).encode()
        request = urllib.request.Request(urls[0] + "/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            response.readline()  # the next step has begun or is about to
            started = time.monotonic()
            samples = scrape(urls[1])
            at_most_s(time.monotonic() - started, 1.0, "the scrape")
            assert total(samples, "vllm:num_requests_running") == 1
            assert total(samples, "drafthouse:fence_timeouts_total") == 0
