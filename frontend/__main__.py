"""One frontend process: `python -m frontend --engine ADDRESSES --model MODEL --port PORT`.

Owns start-up, the order of shutting down and the exit code: 0 after SIGTERM or SIGINT, 1 for an engine that can never be
served and for a port that cannot be had, 2 for bad options or model files. Everything else is `frontend.app`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time

import uvloop

from frontend.admission import Admission
from frontend.api_keys import VARIABLE
from frontend.app import Listener, build_app
from frontend.chat_template import TemplateError
from frontend.config import FrontendConfig
from frontend.connections import raise_open_files_limit
from frontend.deltas import IntervalLogs
from frontend.engine_pool import EnginePool, PoolSettings
from frontend.key_ring import KeyRing
from frontend.log_format import configure_logging
from frontend.metrics import FrontendMetrics
from frontend.server import Server
from frontend.telemetry import start_telemetry
from frontend.text import Text, load_text
from protocol.curve_keys import ClientKeys, load_client_keys
from protocol.endpoints import is_loopback, split_addresses
from protocol.model_files import ModelFilesError, resolve
from protocol.options import from_process, refuse
from protocol.served_name import check_served_model_name

PROGRAM = "drafthouse frontend"
LAST_WORDS_S = 2.0  # for streams to say that the server is going
POLL_S = 0.05  # how often draining looks whether all are done

logger = logging.getLogger("frontend")


def main() -> int:
    config = from_process(FrontendConfig, program=PROGRAM, secrets=(VARIABLE,))
    configure_logging(config.log_level, config.log_format)
    started_s = time.monotonic()
    try:
        files = resolve(config.model)
        text = load_text(files)
        model_name = check_served_model_name(config.served_model_name or files.name)
        ring = KeyRing(config, os.environ)
        curve = load_client_keys(config.curve_key_file, config.curve_server_key_file)
    except (ModelFilesError, TemplateError, ValueError) as error:
        refuse(PROGRAM, str(error))
    logger.info(
        "model loaded model=%s served_model_name=%s vocabulary=%d seconds=%.2f",
        config.model,
        model_name,
        text.tokenizer.vocab_size,
        time.monotonic() - started_s,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, text, model_name, ring, curve))


async def _run(config: FrontendConfig, text: Text, model_name: str, ring: KeyRing, curve: ClientKeys | None) -> int:
    metrics = FrontendMetrics(text.context_length)
    settings = PoolSettings(
        split_addresses(config.engine), text.tokenizer.vocabulary_hash, model_name, curve, config.allow_plaintext_tcp
    )
    engines = EnginePool(settings, metrics)
    try:
        telemetry = start_telemetry(config, os.environ, metrics, lambda: engines.observed)
    except (ValueError, OSError) as error:
        refuse(PROGRAM, str(error))
    server = Server(
        config=config,
        engine=engines,
        text=text,
        metrics=metrics,
        admission=Admission(config, metrics),
        views=engines.views,
        model_name=model_name,
        started_s=int(time.time()),
        tracer=telemetry.tracer,
        admin=ring.admin,
        gate=ring.gate,
    )
    if not ring.gate.keys and not is_loopback(config.host):
        logger.warning("open to the network host=%s advice='set --api-key-file'", config.host)
    raise_open_files_limit()
    listener = Listener(build_app(server), config)
    stopping = _stop_signals()
    await engines.start()
    try:
        await listener.start()
    except OSError as error:
        logger.error("cannot listen address=%s:%d reason=%r", config.host, config.port, error.strerror or str(error))
        await engines.stop()
        return 1
    logger.info("listening url=http://%s:%d engine=%s pid=%d", config.host, listener.port, config.engine, os.getpid())
    keeping = asyncio.create_task(ring.watch(), name="key ring")
    intervals = asyncio.create_task(IntervalLogs(lambda: engines.observed).run(), name="interval log")
    refused = asyncio.create_task(engines.wait_refused(), name="engine refusal")
    signalled = asyncio.create_task(stopping.wait(), name="stop signal")
    await asyncio.wait({refused, signalled}, return_when=asyncio.FIRST_COMPLETED)
    code = 1 if refused.done() and not signalled.done() else 0
    stopping.clear()
    if code == 0:
        await _drain(server, stopping)
    await _end(server, engines, listener)
    for task in (keeping, intervals, refused, signalled):
        task.cancel()
    await asyncio.gather(keeping, intervals, refused, signalled, return_exceptions=True)
    telemetry.close()
    return code


async def _drain(server: Server, hurried: asyncio.Event) -> None:
    """Not ready at once, refusing new requests after the grace; until what runs is done, the time is up, or a second signal."""
    config = server.config
    deadline_s = time.monotonic() + config.drain_timeout_s
    server.admission.leave()
    logger.info(
        "draining sequences=%d grace_s=%g timeout_s=%g",
        server.admission.sequences,
        config.drain_grace_s,
        config.drain_timeout_s,
    )
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hurried.wait(), config.drain_grace_s)
    server.admission.drain()
    await _until_idle(server, deadline_s, hurried)


async def _end(server: Server, engines: EnginePool, listener: Listener) -> None:
    """Tell whoever is left, then close."""
    server.admission.drain()
    left = server.admission.sequences
    await engines.stop()  # open streams end with an error event now, and the engine aborts them
    await _until_idle(server, time.monotonic() + LAST_WORDS_S, None)
    await listener.stop()
    logger.info("stopped aborted_sequences=%d", left)


async def _until_idle(server: Server, deadline_s: float, hurried: asyncio.Event | None) -> None:
    while server.admission.sequences and time.monotonic() < deadline_s and not (hurried and hurried.is_set()):
        await asyncio.sleep(POLL_S)


def _stop_signals() -> asyncio.Event:
    """Set by SIGTERM and SIGINT, each time."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # platforms without signal handlers on the loop
            loop.add_signal_handler(number, stopping.set)
    return stopping


if __name__ == "__main__":
    sys.exit(main())
