"""Predicted output (OpenAI's `prediction`): what a client expects the answer to be, and what became of it.

Owns the field's shape and limits, its tokens, and the count of predicted tokens that were drafted. Never drafts: that is the
engine's part, and only of an engine that was started for it. Called by `frontend.prompts`, fed by `frontend.choices`, read
by `frontend.answers`.
"""

from collections.abc import Sequence

from frontend.errors import clipped, invalid
from frontend.openai import GenerationRequest
from frontend.text import Text
from frontend.tokenizer import EncodingError
from protocol.messages import Hello, Round

SOURCE = "prediction"  # of the drafts, in Hello.sources
MAX_PREDICTION_PARTS = 4096


def predicted_text(request: GenerationRequest) -> str | None:
    """The text a client expects, None when it predicts nothing. Raises ApiError(400) for a wrong shape.

    Parts are joined without anything between them, as those of a message.
    """
    prediction = request.prediction
    if prediction is None:
        return None
    if prediction.type != "content":
        raise invalid(f"prediction.type must be content, got {clipped(prediction.type)}", "prediction.type")
    if isinstance(prediction.content, str):
        return prediction.content
    if not prediction.content:
        raise invalid("prediction.content must not be an empty list", "prediction.content")
    if len(prediction.content) > MAX_PREDICTION_PARTS:
        raise invalid(
            f"prediction.content has {len(prediction.content)} parts; the limit is {MAX_PREDICTION_PARTS}",
            "prediction.content",
        )
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            where = f"prediction.content[{index}].type"
            raise invalid(f"{where} must be text, got {clipped(part.type)}", where)
    return "".join(part.text for part in prediction.content)


def prediction_token_ids(predicted: str | None, text: Text, hello: Hello) -> tuple[int, ...] | None:
    """The tokens an answer of this text has: special tokens typed in it are plain text, none are added.

    Raises ApiError(400) when no drafter of the engines reads them, or when no answer can be as long.
    """
    if predicted is None:
        return None
    if SOURCE not in hello.sources:
        raise invalid(
            "prediction is not supported by this server: its engines must be started with "
            "--speculator first_of:prediction,ngram (or another that asks prediction)",
            "prediction",
        )
    limit = hello.capacity.max_model_len
    if text.tokenizer.fewest_tokens(predicted) > limit:
        raise invalid(
            f"prediction has {len(predicted)} characters: too many for an answer of at most {limit} tokens",
            "prediction",
        )
    try:
        token_ids = tuple(text.tokenizer.encode_plain(predicted))
    except EncodingError as error:
        raise invalid(f"prediction: {error}", "prediction") from None
    if len(token_ids) > limit:
        raise invalid(f"prediction has {len(token_ids)} tokens; an answer has at most {limit}", "prediction")
    return token_ids


class PredictionUse:
    """What became of the predicted tokens that were drafted for one child.

    `accepted` are part of the answer, `rejected` are not: the target wanted others there, or the answer ended before.
    """

    __slots__ = ("accepted", "drafted")

    def __init__(self) -> None:
        self.accepted = 0
        self.drafted = 0

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def add(self, one: Round, sources: Sequence[str], num_kept: int) -> None:
        """Count one round, of whose tokens `num_kept` belong to the answer; those that were accepted come first."""
        if one.drafted and sources[one.source] == SOURCE:
            self.drafted += one.drafted
            self.accepted += min(one.accepted, num_kept)
