"""From a decoded request to a job for the engine: prompts tokenised, limits checked, parameters converted.

Owns the order of checks, so that nothing of a list runs unless all of it may. Never waits and never submits; safe to run in
a thread, because it only reads. Called by `frontend.completions`.
"""

from dataclasses import dataclass

from frontend.chat import Message, generation_prompt_wanted, plain_messages, template_kwargs
from frontend.chat_template import TemplateError
from frontend.choices import TextSettings
from frontend.errors import ApiError, clipped, invalid
from frontend.generation import Job
from frontend.openai import ChatRequest, CompletionRequest, GenerationRequest
from frontend.prediction import predicted_text, prediction_token_ids
from frontend.prompt_run import Prompt
from frontend.sampling_fields import (
    ModelFacts,
    num_choices,
    num_logprobs,
    priority_of,
    prompt_lists,
    resolve_max_tokens,
    sampling_params,
    sim_script,
    stop_strings,
)
from frontend.spec_stats import wanted_statistics
from frontend.text import Text
from frontend.tokenizer import EncodingError
from protocol.messages import Hello
from protocol.sampling import MAX_N

# Where the tokenizer can give no lower bound: no known vocabulary averages more characters per token over a whole prompt.
MAX_CHARS_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose prompts are known but not tokenised: what admission needs. `sources` one per prompt."""

    request: GenerationRequest
    sources: tuple[str | list[int] | list[Message], ...]
    n: int
    predicted: str | None = None  # the answer that the client expects

    @property
    def num_sequences(self) -> int:
        return self.n * len(self.sources)

    @property
    def num_chars(self) -> int:
        """Characters (or ids) to work through."""
        return sum(_num_chars(source) for source in self.sources) + len(self.predicted or "")


def draft_of(request: GenerationRequest, max_prompts: int) -> Draft:
    """Raises ApiError(400) for prompts or messages of the wrong shape, and for more sequences than one request may run."""
    n = num_choices(request)
    predicted = predicted_text(request)
    if isinstance(request, ChatRequest):
        if request.add_special_tokens:
            raise invalid(
                "add_special_tokens is not supported for chat: the template writes them", "add_special_tokens"
            )
        messages = plain_messages(request)
        generation_prompt_wanted(request, messages)
        return Draft(request, (messages,), n, predicted)
    if not isinstance(request, CompletionRequest):
        raise TypeError(type(request))
    prompts = prompt_lists(request.prompt)
    if not prompts:
        raise invalid("prompt must not be an empty list", "prompt")
    if len(prompts) > max_prompts:
        raise invalid(f"prompt has {len(prompts)} entries; the limit is {max_prompts}", "prompt")
    # An idle server takes whatever it is asked, and then refuses everybody else until that is done.
    if len(prompts) * n > max(max_prompts, MAX_N):
        raise invalid(
            f"prompt has {len(prompts)} entries and n is {n}: {len(prompts) * n} sequences, where the limit of one "
            f"request is {max(max_prompts, MAX_N)}",
            "n",
        )
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, list) and not prompt:
            raise _empty_prompt(index, len(prompts))
    return Draft(request, tuple(prompts), n, predicted)


def fewest_tokens(draft: Draft, text: Text, max_model_len: int, max_prompt_chars: int | None) -> int:
    """A lower bound of the prompt tokens, at no cost. Raises ApiError(400) for text that cannot fit the context."""
    fewest = 0
    for source in draft.sources:
        if isinstance(source, list) and source and isinstance(source[0], int):
            fewest += len(source)
            continue
        num_chars = _num_chars(source)
        limit = max_prompt_chars or MAX_CHARS_PER_TOKEN * max_model_len
        tokens = text.tokenizer.fewest_tokens(source) if isinstance(source, str) else 0
        if num_chars > limit or tokens > max_model_len:
            raise invalid(
                f"this model's context is {max_model_len} tokens; a prompt of {num_chars} characters is too long",
                "prompt" if isinstance(source, str) else "messages",
                "context_length_exceeded",
            )
        fewest += tokens
    return fewest


def job_of(draft: Draft, text: Text, hello: Hello, spec_decode_metrics: str = "none") -> Job:
    """Tokenise and convert. Raises ApiError(400); takes about a second per 4 MB of text.

    `spec_decode_metrics` is the server's setting, for requests that do not say.
    """
    request = draft.request
    eos = text.tokenizer.eos_token_ids
    facts = ModelFacts(hello.vocab_size, hello.capacity.max_model_len, text.generation_defaults, eos)
    stops = stop_strings(request)
    sim = sim_script(request, hello)
    priority = priority_of(request)
    prediction = prediction_token_ids(draft.predicted, text, hello)
    prompts = []
    for index, source in enumerate(draft.sources):
        token_ids = _token_ids(request, source, text, facts.vocab_size)
        if not token_ids:
            raise _empty_prompt(index, len(draft.sources))
        max_tokens = resolve_max_tokens(request, len(token_ids), facts.max_model_len)
        params = sampling_params(request, max_tokens, facts, text.bad_word_token_ids)
        prompts.append(Prompt(token_ids, source if isinstance(source, str) else None, params))
    settings = TextSettings(
        stops=stops,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        wants_logprobs=num_logprobs(request) is not None,
        statistics=wanted_statistics(
            request.spec_decode_metrics or spec_decode_metrics,
            draft.num_sequences,
            hello.max_draft_len,
            hello.synthetic,
        ),
        has_prediction=prediction is not None,
        synthetic=hello.synthetic,
    )
    asked = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked = request.max_completion_tokens
    operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
    return Job(tuple(prompts), draft.n, settings, priority, sim, asked, operation, prediction=prediction or ())


def _token_ids(
    request: GenerationRequest, source: str | list[int] | list[Message], text: Text, vocab_size: int
) -> tuple[int, ...]:
    if isinstance(source, str):
        try:
            return tuple(text.encode_prompt(source, add_special_tokens=request.add_special_tokens is not False))
        except EncodingError as error:
            raise invalid(f"prompt: {error}", "prompt") from None
    if isinstance(request, ChatRequest):
        return _chat_token_ids(request, source, text)  # type: ignore[arg-type]  # a chat's source is its messages
    token_ids: tuple[int, ...] = tuple(source)  # type: ignore[arg-type]
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"prompt has token id {clipped(token_id)}; the vocabulary is 0 to {vocab_size - 1}", "prompt")
    return token_ids


def _chat_token_ids(request: ChatRequest, messages: list[Message], text: Text) -> tuple[int, ...]:
    adds, continues = generation_prompt_wanted(request, messages)
    try:
        return tuple(
            text.encode_chat(
                messages,
                add_generation_prompt=adds,
                continue_final_message=continues,
                template_kwargs=template_kwargs(request),
            )
        )
    except TemplateError as error:
        param = "messages" if error.index is None else f"messages[{error.index}]"
        raise invalid(f"{param}: {error}", param) from None
    except EncodingError as error:
        raise invalid(f"messages: {error}", "messages") from None


def _num_chars(source: str | list[int] | list[Message]) -> int:
    if isinstance(source, str):
        return len(source)
    return sum(len(item["content"]) if isinstance(item, dict) else 1 for item in source)


def _empty_prompt(index: int, num_prompts: int) -> ApiError:
    where = f"prompt[{index}]" if num_prompts > 1 else "prompt"
    return invalid(f"{where} must not be empty: there is nothing to continue", "prompt")
