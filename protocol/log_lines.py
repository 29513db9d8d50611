"""Log lines for machines: one JSON object per line, whatever a message contains.

Owns the spelling of a log record and the one installation of a handler on standard error. Never decides what is logged and
never adds anything of a request but the trace id that the caller names. Called by both entry points, once, before they log.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

TRACE_ID = "trace_id"
# Valid inside JSON strings, but line ends to some readers and commands to some terminals.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029]")


class JsonLines(logging.Formatter):
    """`{"time", "level", "logger", "message"}`, then `constant` fields, then trace_id and exception where there are any.

    `time` is RFC 3339 in UTC with milliseconds. `trace_id` of the record (logging's `extra`) wins over `current_trace_id`.
    """

    def __init__(
        self, constant: Mapping[str, str] | None = None, current_trace_id: Callable[[], str | None] = lambda: None
    ) -> None:
        super().__init__()
        self._constant = dict(constant or {})
        self._current_trace_id = current_trace_id

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": utc_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
        }
        trace_id = getattr(record, TRACE_ID, None) or self._current_trace_id()
        if trace_id is not None:
            line[TRACE_ID] = str(trace_id)
        exception = "\n".join(self._tracebacks(record))
        if exception:
            line["exception"] = exception
        return _UNSAFE.sub(_escaped, msgspec.json.encode({key: _valid(text) for key, text in line.items()}).decode())

    def _tracebacks(self, record: logging.LogRecord) -> list[str]:
        """What the text format puts on the lines below the message."""
        texts = [self.formatException(record.exc_info)] if record.exc_info and record.exc_info[1] is not None else []
        if not texts and record.exc_text:
            texts.append(record.exc_text)
        return [*texts, self.formatStack(record.stack_info)] if record.stack_info else texts


def install(level: str, formatter: logging.Formatter) -> None:
    """Log to standard error from `level` on, spelled by `formatter`. Warnings of Python become lines like all others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if isinstance(formatter, JsonLines):
        logging.captureWarnings(True)


def utc_time(unix_s: float) -> str:
    """RFC 3339 with milliseconds."""
    seconds, milliseconds = divmod(int(unix_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"


def _valid(text: str) -> str:
    """UTF-8 can carry it: half a surrogate pair (an undecodable byte of a file name, say) is written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(found: "re.Match[str]") -> str:
    return f"\\u{ord(found[0]):04x}"
