"""What both sides of the wire refuse of a request's sampling parameters, each by the field to blame."""

import math

import pytest

from protocol.sampling import MAX_LOGIT_BIAS, InvalidSampling, SamplingParams

VOCAB, EOS = 100, (2,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop_token_ids", (100,)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("bad_words", ((),)),
        ("bad_words", ((100,),)),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(field: str, value: object):
    params = SamplingParams(**{"max_tokens": 5, field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidSampling, match=field) as caught:
        params.check(VOCAB, EOS)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "options",
    [{"allowed_token_ids": (2,)}, {"allowed_token_ids": (2, 7), "stop_token_ids": (7,)}],
)
def test_min_tokens_that_forbid_every_allowed_token_are_refused(options: dict[str, object]):
    with pytest.raises(InvalidSampling, match="min_tokens") as caught:
        SamplingParams(max_tokens=5, min_tokens=1, **options).check(VOCAB, EOS)  # type: ignore[arg-type]
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"allowed_token_ids": (2,)},
        {"allowed_token_ids": (2, 7), "min_tokens": 1},
        {"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True},
        {"temperature": 0.0, "top_k": 0, "min_tokens": 5, "seed": -(2**63), "logprobs": 20},
    ],
)
def test_values_at_their_limits_pass(options: dict[str, object]):
    SamplingParams(max_tokens=5, **options).check(VOCAB, EOS)  # type: ignore[arg-type]
