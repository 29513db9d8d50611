"""Log lines: one JSON object per line whatever is logged, the right trace id, and access lines without query or headers."""

import asyncio
import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from frontend.log_format import CURRENT_TRACE_ID, AccessLogger
from protocol.log_lines import JsonLines, utc_time
from tests.e2e.servers import ROOT

TRACE = "0af7651916cd43dd8448eb211c80319c"
OTHER_TRACE = "11111111111111111111111111111111"


class Lines:
    """A logger of its own whose output is read as lines."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.logger = logging.Logger("frontend.test")
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(JsonLines(current_trace_id=CURRENT_TRACE_ID.get))
        self.logger.addHandler(handler)

    def read(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    token = CURRENT_TRACE_ID.set(None)
    yield Lines()
    CURRENT_TRACE_ID.reset(token)


def test_a_line_has_time_level_logger_and_message_and_nothing_else(lines: Lines):
    lines.logger.warning("queue full size=%d", 7)
    (line,) = lines.read()
    time = line.pop("time")
    assert line == {"level": "warning", "logger": "frontend.test", "message": "queue full size=7"}
    assert len(time) == len("2026-11-30T13:32:33.123Z") and time[10] == "T" and time[-1] == "Z"


@pytest.mark.parametrize(
    ("unix_s", "text"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000.25, "2023-11-14T22:13:20.250Z"),
        (1_700_000_000.9996, "2023-11-14T22:13:20.999Z"),
    ],
)
def test_times_are_utc_with_milliseconds(unix_s: float, text: str):
    assert utc_time(unix_s) == text


NASTY = [chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0x2028, 0x2029)] + [
    "\ud800",
    "\udcff",
    '"',
    "\\",
    "\U0001f600",
]


@pytest.mark.parametrize("nasty", NASTY, ids=lambda text: f"{ord(text):x}")
def test_no_character_breaks_the_line_or_commands_a_terminal(lines: Lines, nasty: str):
    lines.logger.info("before%safter", nasty)
    text = lines.stream.getvalue()
    assert text.endswith("\n") and len(text.splitlines()) == 1
    assert all(" " <= character <= "~" or character > "\xa0" for character in text[:-1])
    (line,) = lines.read()
    written = f"\\u{ord(nasty):x}" if "\ud800" <= nasty <= "\udfff" else nasty
    assert line["message"] == f"before{written}after"


def test_a_traceback_stays_in_its_line(lines: Lines):
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        lines.logger.exception("failed", stack_info=True)
    (line,) = lines.read()
    assert line["message"] == "failed" and line["level"] == "error"
    assert "ValueError: one\ntwo" in line["exception"] and "Stack (most recent call last)" in line["exception"]


def test_exc_info_without_an_exception_adds_nothing(lines: Lines):
    lines.logger.info("fine", exc_info=True)
    assert "exception" not in lines.read()[0]


async def test_lines_carry_the_trace_of_their_own_task(lines: Lines):
    async def traced(trace_id: str) -> None:
        CURRENT_TRACE_ID.set(trace_id)
        await asyncio.sleep(0)
        lines.logger.info("of %s", trace_id)

    await asyncio.gather(traced(TRACE), traced(OTHER_TRACE))
    lines.logger.info("of nobody")
    first, second, third = lines.read()
    assert first["message"] == f"of {first['trace_id']}" and second["message"] == f"of {second['trace_id']}"
    assert {first["trace_id"], second["trace_id"]} == {TRACE, OTHER_TRACE} and "trace_id" not in third


def test_the_trace_named_by_the_record_wins(lines: Lines):
    CURRENT_TRACE_ID.set(TRACE)
    lines.logger.info("explicit", extra={"trace_id": OTHER_TRACE})
    lines.logger.info("none named", extra={"trace_id": None})
    assert [line["trace_id"] for line in lines.read()] == [OTHER_TRACE, TRACE]


def test_constant_fields_are_in_every_line(lines: Lines):
    lines.logger.handlers[0].setFormatter(JsonLines({"engine": "gpu-3"}))
    lines.logger.info("ready")
    assert lines.read()[0]["engine"] == "gpu-3"


async def _answer(request: web.Request) -> web.Response:
    headers = {"X-Trace-Id": TRACE} if "traced" in request.query else {}
    return web.Response(text="hello", headers=headers)


async def _access_lines(lines: Lines, *requests: tuple[str, str]) -> list[dict[str, str]]:
    app = web.Application()
    app.router.add_route("*", "/v1/models/{model:.+}", _answer)
    server = TestServer(app)
    await server.start_server(access_log=lines.logger, access_log_class=AccessLogger)
    async with TestClient(server) as client:
        for method, path in requests:
            headers = {"User-Agent": "secret-agent", "Referer": "http://secret", "Authorization": "Bearer secret"}
            async with client.request(method, path, headers=headers) as response:
                await response.read()
    return lines.read()


async def test_an_access_line_has_the_route_not_the_path_and_no_header(lines: Lines):
    (line,) = await _access_lines(lines, ("GET", "/v1/models/my-secret-model?api_key=secret"))
    assert "secret" not in lines.stream.getvalue()
    words = dict(word.split("=") for word in line["message"].split()[1:])
    assert line["message"].startswith("answered method=GET route=/v1/models/{model} status=200 bytes=")
    assert 5 <= int(words["bytes"]) < 1000 and 0 <= float(words["seconds"]) < 10


async def test_bytes_that_are_no_http_have_an_access_line_and_no_traceback(lines: Lines, caplog):
    app = web.Application()
    app.router.add_get("/health", _answer)
    server = TestServer(app)
    await server.start_server(access_log=lines.logger, access_log_class=AccessLogger)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET /health secret HTTP/9.9\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    await server.close()
    (line,) = lines.read()
    assert " route=none status=400 " in line["message"] and "secret" not in line["message"]
    assert not [record for record in caplog.records if "Unhandled exception" in record.getMessage()]


async def test_an_access_line_of_a_traced_request_carries_its_trace(lines: Lines):
    traced, untraced = await _access_lines(lines, ("GET", "/v1/models/a?traced"), ("GET", "/v1/models/a"))
    assert traced["trace_id"] == TRACE and "trace_id" not in untraced


async def test_unknown_routes_and_methods_have_one_name_each(lines: Lines):
    no_route, odd_method = await _access_lines(lines, ("GET", "/secret"), ("PROPFIND", "/v1/models/a"))
    assert " method=GET route=none status=404 " in no_route["message"]
    assert " method=OTHER route=/v1/models/{model} status=200 " in odd_method["message"]


def _logged(log_format: str) -> list[str]:
    """Standard error of a process that configures logging, logs, and warns."""
    script = (
        "import logging, warnings; from frontend.log_format import configure_logging; "
        f"configure_logging('info', {log_format!r}); logging.getLogger('frontend').info('up port=%d', 1); "
        "logging.getLogger('frontend').debug('hidden'); warnings.warn('old')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    return ended.stderr.splitlines()


def test_a_process_in_json_writes_only_json_even_its_warnings():
    lines = [json.loads(line) for line in _logged("json")]
    assert [(line["logger"], line["level"]) for line in lines] == [("frontend", "info"), ("py.warnings", "warning")]
    assert lines[0]["message"] == "up port=1" and "old" in lines[1]["message"]


def test_a_process_in_text_writes_the_format_it_always_had():
    first = _logged("text")[0]
    assert first.endswith(" INFO frontend up port=1") and first[:2] == "20"


def test_the_formatter_itself_warns_of_nothing(lines: Lines):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines.logger.info("fine")
    assert lines.read()[0]["message"] == "fine"
