"""Everything a frontend knows about text, for the model it serves: prompts and chats to tokens, tokens to text.

Owns the pairing of tokenizer and chat template. Never holds a request's state. Called by the request handlers; `encode_*`
work for milliseconds to seconds and let other threads run, so call them with asyncio.to_thread for anything long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frontend.chat_template import ChatTemplate, Message, TemplateError
from frontend.stop_strings import StopMatcher
from frontend.tokenizer import Tokenizer, bad_word_token_ids, load_tokenizer
from protocol.model_files import (
    ModelFiles,
    read_chat_template,
    read_context_length,
    read_generation_defaults,
    read_token_variables,
)


@dataclass(frozen=True)
class Text:
    """One model's text side; safe to share between threads."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the model has none
    context_length: int  # tokens
    generation_defaults: Mapping[str, float | int]  # fields of SamplingParams that the model's authors recommend

    def encode_prompt(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a /v1/completions prompt. Special tokens written in it are parsed, as in vLLM.

        Raises `EncodingError`.
        """
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Special tokens come from the template only: in messages they are plain text.

        Raises `TemplateError` and `EncodingError`.
        """
        rendered = self._template().render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            transform=self.tokenizer.shield,
        )
        return self.tokenizer.encode_guarded(rendered)

    def stop_matcher(
        self,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> StopMatcher:
        """A new child's text."""
        return StopMatcher(
            self.tokenizer,
            stops,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=min_tokens,
        )

    def bad_word_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences to ban for `words`."""
        return bad_word_token_ids(self.tokenizer, words)

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        return self.chat_template


def load_text(files: ModelFiles) -> Text:
    """Read and build all of it; the embedded model's takes about 0.6 s.

    Raises `ModelFilesError`, and `TemplateError` for a template that cannot be compiled.
    """
    source = read_chat_template(files)
    return Text(
        tokenizer=load_tokenizer(files),
        chat_template=None if source is None else ChatTemplate(source, read_token_variables(files)),
        context_length=read_context_length(files),
        generation_defaults=read_generation_defaults(files),
    )
