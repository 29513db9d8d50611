"""Answers of /v1/completions and /v1/chat/completions as JSON objects, whole and in chunks.

Owns the two shapes; both are fed the same pieces. Never waits and never writes. Called by `frontend.completions`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.choices import Choice, Piece, prompt_entries
from frontend.generation import Generation
from frontend.logprobs import Json, chat_logprobs, completion_logprobs, prompt_logprobs
from frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the client wants to see beyond text."""

    answer_id: str
    model: str
    logprobs: bool
    token_ids: bool
    prompt_logprobs: bool
    echo: bool
    include_usage: bool
    continuous_usage: bool


class Answer(ABC):
    """One request's answer. `chunks` and `whole` take pieces in the order `Choice.take` gave them."""

    kind: str

    def __init__(self, options: AnswerOptions, generation: Generation, tokenizer: Tokenizer) -> None:
        self.options = options
        self.generation = generation
        self.tokenizer = tokenizer
        self._created = int(time.time())
        self._num_tokens_sent = 0

    def chunks(self, choice: Choice, piece: Piece) -> list[Json]:
        """The chunk of one piece; before a child's first piece also what opens it."""
        chunks = []
        if piece.is_first:
            chunks += [self._chunk(opening, choice) for opening in self._openings(choice)]
        self._num_tokens_sent += len(piece.token_ids)
        chunks.append(self._chunk(self._streamed(choice, piece), choice))
        return chunks

    def usage_chunk(self) -> Json:
        """The last chunk when usage was asked for: no choices. Sent when all children have ended."""
        usage = self._final_usage()
        return {**self._head(streamed=True), "choices": [], "usage": usage, **self._metrics()}

    def whole(self, pieces: Mapping[int, Piece]) -> Json:
        """The answer that is not streamed. `pieces`: all of each child's, joined, by index. Takes 2 us per log-probability.

        Each choice is encoded by itself: of all of them at once, the objects are ten times the size of the text.
        """
        choices = self.generation.choices
        return {
            **self._head(streamed=False),
            "choices": [
                msgspec.Raw(msgspec.json.encode(self._complete(choice, pieces[choice.index]))) for choice in choices
            ],
            "usage": self._final_usage(),
            **self._metrics(),
            **self._request_fields(choices[0]),
        }

    @abstractmethod
    def _openings(self, choice: Choice) -> Iterable[Json]:
        """What is sent before a child's first piece, as entries of `choices`."""

    @abstractmethod
    def _streamed(self, choice: Choice, piece: Piece) -> Json: ...

    @abstractmethod
    def _complete(self, choice: Choice, piece: Piece) -> Json: ...

    @abstractmethod
    def _request_fields(self, choice: Choice) -> Json:
        """Fields of the request as a whole, beside `choices`."""

    def _chunk(self, choice_json: Json, choice: Choice) -> Json:
        chunk = {**self._head(streamed=True), "choices": [choice_json]}
        if self.options.include_usage:
            chunk["usage"] = self._usage(self._num_tokens_sent) if self.options.continuous_usage else None
        return chunk

    def _head(self, *, streamed: bool) -> Json:
        kind = f"{self.kind}.chunk" if streamed and self.kind == "chat.completion" else self.kind
        return {
            "id": self.options.answer_id,
            "object": kind,
            "created": self._created,
            "model": self.options.model,
            **self._fingerprint(),
        }

    def _fingerprint(self) -> Json:
        """What else must be known to take the text for what it is; in every chunk, so that no part of it goes without."""
        synthetic = self.generation.job.settings.synthetic
        return {"system_fingerprint": f"synthetic_acceptance={synthetic}"} if synthetic else {}

    def _usage(self, completion_tokens: int) -> Json:
        prompt_tokens = self.generation.job.num_prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens},
        }

    def _final_usage(self) -> Json:
        """With a prediction, what became of it: known for good only when all children have ended."""
        usage = self._usage(self.generation.completion_tokens)
        uses = [choice.prediction for choice in self.generation.choices]
        known = [use for use in uses if use is not None]
        if not known or len(known) < len(uses):
            return usage
        details = {
            "accepted_prediction_tokens": sum(use.accepted for use in known),
            "rejected_prediction_tokens": sum(use.rejected for use in known),
        }
        return {**usage, "completion_tokens_details": details}

    def _metrics(self) -> Json:
        """Statistics of the request. They describe one sequence: with several children or prompts there is no whole."""
        if self.generation.job.settings.statistics is None:
            return {}
        statistics = self.generation.choices[0].statistics
        return {"metrics": {"speculative_decoding": None if statistics is None else statistics.report()}}

    def _ending(self, piece: Piece) -> Json:
        ending: Json = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if self.options.token_ids:
            ending["token_ids"] = piece.token_ids
        return ending

    def _prompt_logprobs(self, choice: Choice) -> Json:
        if not self.options.prompt_logprobs:
            return {}
        prompt, given = self.generation.prompt_of(choice)
        listed = None if given is None else prompt_logprobs(prompt.token_ids, given, self.tokenizer)
        return {"prompt_logprobs": listed}


class CompletionAnswer(Answer):
    """/v1/completions. With `echo` the prompt is part of the text, its tokens part of the log-probabilities."""

    kind = "text_completion"

    def __init__(self, options: AnswerOptions, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(options, generation, tokenizer)
        self._echoes: dict[int, str] = {}  # by index of the prompt

    def _openings(self, choice: Choice) -> Iterable[Json]:
        return ()

    def _streamed(self, choice: Choice, piece: Piece) -> Json:
        is_first = piece.is_first
        return self._json(choice, piece, echoes=is_first and self.options.echo, with_prompt=is_first)

    def _complete(self, choice: Choice, piece: Piece) -> Json:
        return {**self._json(choice, piece, self.options.echo, with_prompt=True), **self._prompt_logprobs(choice)}

    def _request_fields(self, choice: Choice) -> Json:
        return {}

    def _json(self, choice: Choice, piece: Piece, echoes: bool, with_prompt: bool) -> Json:
        text = self._echo(choice) + piece.text if echoes else piece.text
        answer: Json = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, piece, echoes) if self.options.logprobs else None,
            **self._ending(piece),
        }
        if self.options.token_ids and with_prompt:
            answer["prompt_token_ids"] = self.generation.prompt_of(choice)[0].token_ids
        return answer

    def _logprobs(self, choice: Choice, piece: Piece, echoes: bool) -> Json:
        shift = len(self._echo(choice)) if self.options.echo else 0
        columns = completion_logprobs(piece.entries or (), self.tokenizer, shift)
        if not echoes:
            return columns
        prompt, given = self.generation.prompt_of(choice)
        before = completion_logprobs(prompt_entries(prompt.token_ids, given, self.tokenizer), self.tokenizer, 0)
        return {name: before[name] + column for name, column in columns.items()}

    def _echo(self, choice: Choice) -> str:
        number = choice.index // self.generation.job.n
        if number not in self._echoes:
            prompt = self.generation.prompt_of(choice)[0]
            decoded = prompt.text
            if decoded is None:
                decoded = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            self._echoes[number] = decoded
        return self._echoes[number]


class ChatAnswer(Answer):
    """/v1/chat/completions. A child's first chunk is its role, sent together with its first text."""

    kind = "chat.completion"

    def _openings(self, choice: Choice) -> Iterable[Json]:
        yield {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def _chunk(self, choice_json: Json, choice: Choice) -> Json:
        chunk = super()._chunk(choice_json, choice)
        if self.options.token_ids and "role" in choice_json["delta"]:
            chunk["prompt_token_ids"] = self.generation.prompt_of(choice)[0].token_ids
        return chunk

    def _streamed(self, choice: Choice, piece: Piece) -> Json:
        delta: Json = {"content": piece.text} if piece.text else {}
        return self._json(choice, piece, {"delta": delta})

    def _complete(self, choice: Choice, piece: Piece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._json(choice, piece, {"message": message})

    def _request_fields(self, choice: Choice) -> Json:
        fields: Json = self._prompt_logprobs(choice)
        if self.options.token_ids:
            fields["prompt_token_ids"] = self.generation.prompt_of(choice)[0].token_ids
        return fields

    def _json(self, choice: Choice, piece: Piece, said: Mapping[str, Any]) -> Json:
        return {
            "index": choice.index,
            **said,
            "logprobs": chat_logprobs(piece.entries or (), self.tokenizer) if self.options.logprobs else None,
            **self._ending(piece),
        }
