"""What a frontend takes on at once, and that every share is given back."""

import pytest

from frontend.admission import Admission
from frontend.config import FrontendConfig
from frontend.errors import ApiError
from frontend.metrics import FrontendMetrics
from protocol.served_name import check_served_model_name
from tests.frontend.fakes_client import hello

CAPACITY = hello().capacity


def admission(**options):
    metrics = FrontendMetrics(100)
    metrics.attach("0", "m")
    return Admission(FrontendConfig(**options), metrics), metrics


def rejections(metrics, reason):
    text = metrics.render((), "", "frontend")[0].decode()
    line = f'vllm:admission_rejections_total{{model_name="m",reason="{reason}"}} '
    return int(text.split(line)[1].split("\n")[0])


def test_sequences_beyond_the_limit_are_refused_and_counted():
    gate, metrics = admission(max_inflight_requests=3)
    with gate.reserve(2, CAPACITY):
        with pytest.raises(ApiError) as caught:
            gate.reserve(2, CAPACITY)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        with gate.reserve(1, CAPACITY):
            assert gate.sequences == 3
    assert gate.sequences == 0
    assert rejections(metrics, "max_num_queued_reqs") == 1


def test_a_request_larger_than_the_limit_may_run_alone():
    gate, _ = admission(max_inflight_requests=3)
    with gate.reserve(10, CAPACITY):
        pass


def test_the_default_limit_is_what_the_engine_runs_and_queues():
    gate, _ = admission()
    with gate.reserve(8 + 16, CAPACITY), pytest.raises(ApiError):
        gate.reserve(1, CAPACITY)


def test_prompt_tokens_are_given_back_even_after_a_refusal():
    gate, metrics = admission(max_inflight_prompt_tokens=100)
    with gate.reserve(1, CAPACITY) as first:
        first.reserve_tokens(10)
        first.reserve_tokens(60)  # the true number replaces the estimate
        assert gate.prompt_tokens == 60
        with pytest.raises(ApiError, match="prompt tokens"), gate.reserve(1, CAPACITY) as second:
            second.reserve_tokens(41)
        assert gate.prompt_tokens == 60
        first.reserve_tokens(20)
        assert gate.prompt_tokens == 20
    assert (gate.prompt_tokens, gate.sequences) == (0, 0)
    assert rejections(metrics, "max_num_queued_tokens") == 1


def test_a_draining_frontend_takes_nothing():
    gate, metrics = admission()
    gate.drain()
    with pytest.raises(ApiError, match="shutting down"):
        gate.reserve(1, CAPACITY)
    assert rejections(metrics, "draining") == 1


@pytest.mark.parametrize("name", ["My Model", "", 'a"b', "a\nb", "a{b", "a\\b", "a\u00a0b"])
def test_served_model_names_that_break_metric_readers_are_refused(name):
    with pytest.raises(ValueError, match="served-model-name"):
        check_served_model_name(name)
    with pytest.raises(ValueError, match="served-model-name"):
        FrontendConfig(served_model_name=name)


def test_option_defaults_are_valid_and_bad_ones_name_themselves():
    assert FrontendConfig().keep_alive_s >= 75
    for options, word in (({"engine": "udp://x"}, "udp"), ({"host": ""}, "host")):
        with pytest.raises(ValueError, match=word):
            FrontendConfig(**options)
