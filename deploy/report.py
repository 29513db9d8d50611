"""`drafthouse report`: pictures of what speculation did, from a live server or from a trace file.

Owns the options, the order of things and what is printed for people. Reading spans, counting, talking to a server and
drawing are the report_* modules'. Never part of serving: no other role imports it.
"""

import asyncio
import importlib.util
import os
import secrets
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from deploy.report_numbers import Acceptance, acceptance_in, key_figures, milliseconds, rounds_of
from deploy.report_receiver import Receiver, read_dump
from deploy.report_server import ServerTrouble, ask, read_metrics, served
from deploy.report_spans import MalformedTrace, Request, Span, find_requests, read_lines
from frontend.api_keys import VARIABLE
from frontend.key_files import check_key
from protocol.options import from_process, refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRAM = "drafthouse report"
OTLP_HTTP_PORT = 4318
MAX_LISTED = 10
EXIT_FAILURE = 1
DEFAULT_PROMPT = 12 * "red blue green one two three\n"  # mixed: drafts from the prompt, from the answer, and none
_ASKING = ("prompt", "max_tokens", "timeout_s", "save")


class ReportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is made from, and where it goes."""

    trace_file: Annotated[
        str | None, Meta(description="draw a request of this file: OTLP JSON lines, or OTLP protobuf")
    ] = None
    url: Annotated[str | None, Meta(description="base URL of a live server, whose /metrics is read")] = None
    listen: Annotated[
        str | None,
        Meta(
            description="with --url: receive OTLP/HTTP spans on HOST:PORT, send one traced request and draw it; an API key"
            f" that the server asks for goes into {VARIABLE}"
        ),
    ] = None
    serve: Annotated[bool, Meta(description="start a server on a free port, send it one request and draw it")] = False
    serve_options: Annotated[
        str | None,
        Meta(description="with --serve: options of `drafthouse serve`, in one word: --serve-options='--executor sim'"),
    ] = None
    trace_id: Annotated[
        str | None,
        Meta(pattern="^[0-9a-fA-F]{32}$", description="with --trace-file: the trace to draw; default: the slowest"),
    ] = None
    prompt: Annotated[
        str | None, Meta(min_length=1, description="what the one request says; default: a line repeated twelve times")
    ] = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20, description="most output tokens of the one request")] = 128
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="most seconds to wait for the answer, and then for its spans")
    ] = 60.0
    save: Annotated[str | None, Meta(description="file that the received spans are written to, as OTLP JSON lines")] = (
        None
    )
    output: Annotated[str, Meta(description="directory of the pictures")] = "report"

    def __post_init__(self) -> None:
        if self.serve and (self.url is not None or self.trace_file is not None):
            raise ValueError("--serve starts a server of its own: leave out --url and --trace-file")
        if not self.serve and self.url is None and self.trace_file is None:
            raise ValueError("say what to draw: --trace-file FILE, --url URL or --serve")
        if self.listen is not None:
            if self.url is None or self.trace_file is not None:
                raise ValueError("--listen works with --url and without --trace-file")
            address_of(self.listen)
        if self.url is not None:
            base_url(self.url)

    def check_given(self, names: frozenset[str]) -> None:
        asks = self.serve or self.listen is not None
        for name in _ASKING:
            if name in names and not asks:
                raise ValueError(f"--{name.replace('_', '-')} says nothing without --listen or --serve")
        if "serve_options" in names and not self.serve:
            raise ValueError("--serve-options says nothing without --serve")
        if "trace_id" in names and self.trace_file is None:
            raise ValueError("--trace-id says nothing without --trace-file")


@dataclass(frozen=True)
class Material:
    """What there is to draw. `trouble` is a sentence when something that was asked for did not come."""

    request: Request | None
    server: Acceptance | None
    trouble: str | None = None


def main() -> int:
    config = from_process(ReportConfig, program=PROGRAM, secrets=(VARIABLE,))
    if importlib.util.find_spec("matplotlib") is None:
        # With this interpreter: another one's pip would look for drafthouse where it was never installed from.
        refuse(PROGRAM, f"pictures need matplotlib: {sys.executable} -m pip install 'drafthouse[report]'")
    if VARIABLE in os.environ:
        try:
            check_key(os.environ[VARIABLE], VARIABLE)
        except ValueError as error:
            refuse(PROGRAM, str(error))
    try:
        material = asyncio.run(_interruptible(config))
        paths = draw(material, Path(config.output))
    except (MalformedTrace, ServerTrouble, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {_sentence(error)}\n")
        return EXIT_FAILURE
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write(f"{PROGRAM}: interrupted\n")
        return 128 + signal.SIGINT
    _print_figures(material)
    for path in paths:
        _say(f"wrote {path}")
    if material.trouble is not None:
        sys.stderr.write(f"{PROGRAM}: {material.trouble}\n")
        return EXIT_FAILURE
    return 0


def draw(material: Material, directory: Path) -> list[Path]:
    """Write the pictures there is material for; says what cannot be drawn. Raises OSError."""
    from deploy.report_acceptance import acceptance
    from deploy.report_canvas import DPI
    from deploy.report_waterfall import waterfall

    figures: dict[str, Figure] = {}
    rounds = rounds_of(material.request) if material.request is not None else []
    if material.request is not None:
        figures["waterfall.png"] = waterfall(material.request)
        if not rounds:
            _say("the request has no spec_verify span: no speculation, no round, or a trace level below 2")
    picture = acceptance(material.server, rounds)
    if picture is not None:
        figures["acceptance.png"] = picture
    else:
        _say("no picture of acceptance: no draft was verified yet")
    if figures:
        directory.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(directory / name, dpi=DPI, pil_kwargs={"optimize": True})
    return [directory / name for name in figures]


# ---- where the material comes from ----


async def _interruptible(config: ReportConfig) -> Material:
    """SIGTERM ends the report as Ctrl-C does, so that a server it started is ended too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await gather(config)


async def gather(config: ReportConfig) -> Material:
    """Read the file or ask the server. Raises `MalformedTrace`, `ServerTrouble` and OSError."""
    if config.serve:
        return await _from_own_server(config)
    url = base_url(config.url) if config.url is not None else None
    if config.listen is not None and url is not None:
        async with Receiver(*address_of(config.listen), secrets.token_hex(16)) as receiver:
            return await _from_server(url, receiver, config)
    request = None
    if config.trace_file is not None:
        wanted = config.trace_id.lower() if config.trace_id is not None else None
        request = choose(read_file(Path(config.trace_file)), wanted, config.trace_file)
    server = acceptance_in(await read_metrics(url)) if url is not None else None
    if url is not None and server is None:
        _say(f"{url} has no vllm:spec_decode families: it serves without a speculator, or has no engine yet")
    return Material(request, server)


async def _from_own_server(config: ReportConfig) -> Material:
    try:
        options = shlex.split(config.serve_options or "")
    except ValueError as error:
        raise ServerTrouble(f"--serve-options cannot be split into words: {error}") from error
    async with Receiver("127.0.0.1", 0, secrets.token_hex(16)) as receiver:
        _say("starting drafthouse serve " + shlex.join(options))
        async with served(options, receiver.url) as url:
            return await _from_server(url, receiver, config)


async def _from_server(url: str, receiver: Receiver, config: ReportConfig) -> Material:
    _say(f"asking {url} for up to {config.max_tokens} tokens, traced as {receiver.trace_id}")
    headers = {"traceparent": f"00-{receiver.trace_id}-{secrets.token_hex(8)}-01"}
    if VARIABLE in os.environ:  # never an option: arguments can be read by every user of the machine
        headers["Authorization"] = f"Bearer {os.environ[VARIABLE]}"
    answer = await ask(url, config.prompt or DEFAULT_PROMPT, config.max_tokens, headers, config.timeout_s)
    spans = await receiver.wait(config.timeout_s) if answer.trace_id is not None else []
    if config.save is not None and receiver.lines:
        Path(config.save).write_bytes(b"".join(line + b"\n" for line in receiver.lines))
        _say(f"wrote {config.save}")
    server = acceptance_in(await read_metrics(url))
    requests = find_requests(spans)
    if requests:
        return Material(requests[0], server)
    how = f"start the server with OTEL_EXPORTER_OTLP_ENDPOINT={receiver.url}"
    if urlsplit(receiver.url).port != OTLP_HTTP_PORT:
        how += " and OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    if answer.trace_id is None:
        return Material(None, server, f"the server did not trace the request: {how}, and let no sampler leave it out")
    others = f" ({receiver.num_foreign_spans} of other traces did)" if receiver.num_foreign_spans else ""
    return Material(
        None, server, f"the request was traced, but none of its spans came within {config.timeout_s:g} s{others}: {how}"
    )


def read_file(path: Path) -> list[Span]:
    """The spans of a trace file. Raises `MalformedTrace` and OSError."""
    content = path.read_bytes()
    if not content.strip():
        raise MalformedTrace(f"{path} is empty")
    is_text = content.lstrip(b" \t\r\n").startswith((b"{", b"[", b'"'))
    return read_lines(content.splitlines() if is_text else read_dump(content, str(path)), str(path))


def choose(spans: list[Span], trace_id: str | None, source: str) -> Request:
    """The request of this trace, or the slowest of all. Raises `MalformedTrace` when there is none."""
    requests = find_requests(spans)
    if not requests:
        raise MalformedTrace(f"{source} has {len(spans)} spans and none of them is a stage of a drafthouse request")
    wanted = [request for request in requests if trace_id in (None, request.root.trace_id)]
    if not wanted:
        raise MalformedTrace(f"{source} has no request of trace {trace_id} among its {len(requests)}")
    if len(wanted) > 1:
        _say(f"{source} has {len(wanted)} requests; drawing the slowest of them")
        for request in wanted[:MAX_LISTED]:
            _say(f"  {request.root.trace_id}  {milliseconds(request.root.duration_ns):>10}  {request.root.name}")
        if len(wanted) > MAX_LISTED:
            _say(f"  and {len(wanted) - MAX_LISTED} more")
    return wanted[0]


# ---- words ----


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 host in brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen must be HOST:PORT, such as 127.0.0.1:{OTLP_HTTP_PORT}, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def base_url(text: str) -> str:
    """`text` without a trailing slash. Raises ValueError when it is no http(s) URL."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"--url must look like http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/")


def _print_figures(material: Material) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    if material.request is not None:
        for name, value in key_figures(material.request):
            table.add_row(name, value)
    if material.server is not None:
        server = material.server
        table.add_row("server: drafts", f"{server.num_drafts}, {server.num_draft_tokens} draft tokens")
        if server.num_drafts:
            table.add_row("server: accept rate", f"{server.rate:.1%}, accept length {server.length:.2f}")
            percent = " ".join(f"{rate:.0%}" for rate in server.rate_per_position)
            table.add_row("server: by position", percent)
    if table.row_count:
        Console(file=sys.stdout, highlight=False, markup=False, width=_width()).print(table)


def _sentence(error: Exception) -> str:
    """The file first, where it is about one."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _width() -> int:
    """Of the table: what comes from a terminal, and never so little that a trace id breaks."""
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns) if columns.isascii() and columns.isdigit() else 100, 60)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
