"""Predicted output over HTTP: refused by name where it is wrong or unused, handed on as tokens, counted as OpenAI does."""

import msgspec
import pytest

from frontend.choices import Choice, TextSettings
from frontend.errors import ApiError
from frontend.joint_limits import together
from frontend.openai import ChatRequest, decode_request
from frontend.prediction import MAX_PREDICTION_PARTS, PredictionUse, predicted_text, prediction_token_ids
from protocol.messages import Finish, Round, SequenceOutput
from protocol.reasons import CloseReason, FinishReason
from tests.frontend.fakes_client import FakeEngineClient, embedded_text, hello
from tests.frontend.test_openai_client import MESSAGES, client_of

TEXT = embedded_text()
SOURCES = ("ngram", "prediction")
TAKES = msgspec.structs.replace(hello(), sources=SOURCES)
HELLO_WORLD = (19556, 905)  # "Hello world"
ONE, TWO = 582, 827  # " one", " two"


def predicted(prediction: object) -> str | None:
    body = msgspec.json.encode({"messages": MESSAGES, "prediction": prediction})
    return predicted_text(decode_request(body, ChatRequest)[0])


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (None, None),
        ({"type": "content", "content": "a b"}, "a b"),
        ({"type": "content", "content": ""}, ""),
        ({"type": "content", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, "a b"),
    ],
)
def test_what_is_predicted(prediction: object, text: str | None) -> None:
    assert predicted(prediction) == text


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("a b", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "a", "strength": 2}, "prediction"),
        (
            {"type": "content", "content": [{"type": "text", "text": ""}] * (MAX_PREDICTION_PARTS + 1)},
            "prediction.content",
        ),
    ],
)
def test_a_wrong_shape_is_refused_by_name(prediction: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        predicted(prediction)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_the_tokens_are_those_an_answer_would_have() -> None:
    assert prediction_token_ids("Hello world", TEXT, TAKES) == HELLO_WORLD
    assert prediction_token_ids("", TEXT, TAKES) == ()
    assert prediction_token_ids(None, TEXT, hello()) is None
    typed = prediction_token_ids("a<|im_end|>b", TEXT, TAKES)
    assert typed is not None and TEXT.tokenizer.special_token_ids.isdisjoint(typed)
    assert TEXT.tokenizer.decode(typed) == "a<|im_end|>b"


@pytest.mark.parametrize("sources", [(), ("ngram",), ("sim",)])
def test_without_a_drafter_for_it_a_prediction_is_refused_and_the_sentence_names_one(sources: tuple) -> None:
    with pytest.raises(ApiError, match=r"--speculator first_of:prediction,ngram") as caught:
        prediction_token_ids("", TEXT, msgspec.structs.replace(hello(), sources=sources))
    assert caught.value.param == "prediction"


@pytest.mark.parametrize("text", ["word " * 129, "x" * 100_000])
def test_a_prediction_longer_than_any_answer_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match=r"prediction has .* 128") as caught:
        prediction_token_ids(text, TEXT, TAKES)
    assert caught.value.param == "prediction"


def test_of_several_engines_all_must_take_it() -> None:
    assert together([TAKES, TAKES]).sources == SOURCES
    assert together([TAKES, hello()]).sources == ("ngram",)
    assert together([hello(max_draft_len=0), TAKES]).sources == ()


# ---- counting ----


def drafted(drafted: int, accepted: int, cut: int = 0, source: int = 1, aborted: bool = False) -> Round:
    return Round(drafted, drafted, accepted, 1, cut, source, aborted)


def choice_of(*stops: str) -> Choice:
    settings = TextSettings(stops, False, True, 0, False, has_prediction=True)
    return Choice(0, TEXT.tokenizer, settings)


def use_of(choice: Choice) -> tuple[int, int]:
    assert choice.prediction is not None
    return choice.prediction.accepted, choice.prediction.rejected


def output(first: int, token_ids: tuple[int, ...], one: Round | None, finish: Finish | None = None) -> SequenceOutput:
    return SequenceOutput(1, 0, first, token_ids, None, None, one, (), finish)


def test_only_rounds_drafted_from_the_prediction_count() -> None:
    choice = choice_of()
    choice.push(output(0, (ONE,), None), SOURCES)
    choice.push(output(1, (TWO, ONE, TWO), drafted(5, 2)), SOURCES)
    choice.push(output(4, (ONE, TWO), drafted(5, 1, source=0)), SOURCES)  # n-gram
    choice.push(output(6, (ONE,), drafted(0, 0)), SOURCES)  # a plain round
    choice.push(output(7, (ONE,), drafted(3, 0)), SOURCES)
    assert use_of(choice) == (2, 6)


def test_accepted_tokens_that_an_end_cut_off_did_not_appear() -> None:
    choice = choice_of()
    choice.push(output(0, (ONE, TWO), drafted(4, 4, cut=3), Finish(FinishReason.LENGTH)), SOURCES)
    assert use_of(choice) == (2, 2)


def test_tokens_behind_a_stop_string_did_not_appear_and_the_round_behind_it_counts() -> None:
    choice = choice_of(" two")
    order = choice.push(output(0, (ONE, TWO, ONE, ONE), drafted(3, 3)), SOURCES)
    assert order is not None and order.reason is CloseReason.STOP_STRING
    choice.push(output(4, (), drafted(5, 5, cut=6, aborted=True), Finish(FinishReason.STOP)), SOURCES)
    assert choice.num_tokens == 2
    assert use_of(choice) == (2, 1 + 5)


def test_counts_that_may_lack_a_round_are_not_reported() -> None:
    choice = choice_of(" two")
    choice.push(output(0, (ONE, TWO), drafted(3, 1)), SOURCES)
    choice.give_up_waiting()
    assert choice.prediction is None


def test_drafted_tokens_are_accepted_or_rejected() -> None:
    use = PredictionUse()
    for accepted in range(6):
        use.add(drafted(5, accepted), SOURCES, num_kept=accepted + 1)
    assert (use.accepted, use.rejected) == (15, 15)


# ---- through the official client ----


class DraftingEngine(FakeEngineClient):
    """Answers "Hello world one two", the middle of it by one round drafted from the prediction."""

    def __init__(self) -> None:
        super().__init__(TAKES)

    async def _run(self, given) -> None:
        self.report(given)
        for child in range(given.n):
            given.output(child, (19556,))
            given.output(child, (905, ONE), round=drafted(3, 1))
            given.output(child, (TWO,), round=drafted(2, 0, source=0), finish=Finish(FinishReason.LENGTH))


PREDICTION = {"type": "content", "content": [{"type": "text", "text": "Hello world and all"}]}


@pytest.mark.parametrize("n", [1, 3])
async def test_chat_usage_says_what_became_of_the_prediction(n: int) -> None:
    engine = DraftingEngine()
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(
            model="embedded", messages=MESSAGES, prediction=PREDICTION, n=n, max_tokens=4
        )
    assert engine.submitted[0].prediction_token_ids == tuple(TEXT.tokenizer.encode_plain("Hello world and all"))
    assert answer.choices[0].message.content == "Hello world one two"
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (1 * n, 2 * n)
    assert answer.usage.completion_tokens == 4 * n


async def test_stream_usage_says_it_in_its_last_chunk_only() -> None:
    async with client_of(DraftingEngine()) as client:
        stream = await client.chat.completions.create(
            model="embedded",
            messages=MESSAGES,
            prediction={"type": "content", "content": "Hello world"},
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        usages = [chunk.usage async for chunk in stream]
    assert [usage.completion_tokens_details for usage in usages[:-1]] == [None] * (len(usages) - 1)
    assert usages[-1].completion_tokens_details.accepted_prediction_tokens == 1
    assert usages[-1].completion_tokens_details.rejected_prediction_tokens == 2


async def test_completions_take_a_prediction_for_each_of_their_prompts() -> None:
    engine = DraftingEngine()
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="embedded", prompt=["a", "b"], extra_body={"prediction": {"type": "content", "content": "Hello"}}
        )
    assert [one.prediction_token_ids for one in engine.submitted] == [(19556,)] * 2
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2


async def test_a_request_without_a_prediction_has_no_such_details() -> None:
    engine = DraftingEngine()
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="embedded", messages=MESSAGES, prediction=None)
    assert engine.submitted[0].prediction_token_ids == ()
    assert answer.usage.completion_tokens_details is None
