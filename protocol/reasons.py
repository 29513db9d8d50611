"""Closed sets of reasons, each with the sentence a client sees.

Owns the words; never decides. Used by the engine to say why and by the frontend to tell the client.
"""

from enum import IntEnum


class FinishReason(IntEnum):
    """Why one child of a request ended."""

    STOP = 0  # EOS, a stop token, or a stop string
    LENGTH = 1  # max_tokens or the model's context
    ABORT = 2  # the client went away, or its frontend did
    ERROR = 3  # the engine could not go on with this request

    @property
    def label(self) -> str:
        """The value of vLLM's `finished_reason` label and of OpenAI's `finish_reason`."""
        return self.name.lower()


class CloseReason(IntEnum):
    """Why a frontend closes a request it submitted."""

    CLIENT_GONE = 0
    STOP_STRING = 1
    DELIVERED = 2  # the engine had finished it; the frontend confirms how many tokens it kept


class RejectReason(IntEnum):
    """Why an engine refuses a request without running it."""

    QUEUE_FULL = 0
    QUEUED_TOKENS_FULL = 1
    PROMPT_TOO_LONG = 2
    INVALID = 3
    EXPIRED = 4
    DRAINING = 5
    QUEUE_TIMEOUT = 6  # waited for longer than this engine lets anybody wait

    @property
    def is_overload(self) -> bool:
        """True when the same request may succeed later: the client gets 503, else 400."""
        return self in _OVERLOAD


_OVERLOAD = frozenset(
    {
        RejectReason.QUEUE_FULL,
        RejectReason.QUEUED_TOKENS_FULL,
        RejectReason.EXPIRED,
        RejectReason.DRAINING,
        RejectReason.QUEUE_TIMEOUT,
    }
)


class DetachReason(IntEnum):
    """Why an engine refuses or cuts off a frontend."""

    UNKNOWN = 0  # a message came before Attach: the engine restarted, or the frontend never attached
    SCHEMA = 1
    SILENT = 2  # no Ping for too long
    BEHIND = 3  # too many steps not acknowledged, or the send queue is full
    DUPLICATE = 4
    SHUTDOWN = 5
    FULL = 6  # as many frontends as the engine serves
    LOST = 7  # not every message it sent arrived once

    @property
    def sentence(self) -> str:
        return _DETACH_SENTENCES[self]


_DETACH_SENTENCES = {
    DetachReason.UNKNOWN: "the engine does not know this frontend: attach first",
    DetachReason.SCHEMA: "the frontend speaks another version of the wire schema than the engine",
    DetachReason.SILENT: "the frontend sent no sign of life for too long",
    DetachReason.BEHIND: "the frontend read too slowly and fell too far behind",
    DetachReason.DUPLICATE: "another frontend is attached under the same id",
    DetachReason.SHUTDOWN: "the engine is shutting down",
    DetachReason.FULL: "the engine serves as many frontends as it can",
    DetachReason.LOST: "messages of the frontend were lost or repeated on their way to the engine",
}
