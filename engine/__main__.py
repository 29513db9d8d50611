"""`drafthouse engine`: one engine process, from options to exit code.

Owns the process: logging, the loading bar, signals, and what the exit code says (0 stopped in order, 1 failed, 2 options
or model that cannot be used). Never handles a request.
"""

import gc
import logging
import signal
import sys
import time
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from engine.alive_file import AliveFile, Touching
from engine.assembly import Engine, OnProgress, assemble
from engine.config import EngineConfig
from engine.core import Errands
from engine.listening import check_listening
from engine.wire import WireFailure
from protocol.log_lines import JsonLines, install
from protocol.model_files import ModelFilesError
from protocol.options import EXIT_BAD_OPTIONS, from_process, show

logger = logging.getLogger("engine")

PROGRAM = "drafthouse engine"
# The I/O thread must get its turn while the step thread runs pure Python: heartbeats and acknowledgements wait for it.
SWITCH_INTERVAL_S = 0.0005
EXIT_FAILURE = 1


def main() -> int:
    epoch = time.time_ns()
    config = from_process(EngineConfig, program=PROGRAM)
    _configure_logging(config)
    signals = _Signals(config.drain_timeout_s)
    logger.info("configuration %s", show(config))
    try:
        check_listening(config.listen)
        alive = None if config.alive_file is None else AliveFile(config.alive_file)
        engine = assemble(config, _loading_bar(config), epoch)
    except (ModelFilesError, ValueError) as error:
        return _end(str(error), EXIT_BAD_OPTIONS)
    except WireFailure as error:
        return _end(str(error), EXIT_FAILURE)
    except Exception:
        logger.exception("engine could not be built")
        return EXIT_FAILURE
    try:
        engine.wire.start()
    except WireFailure as error:
        return _end(str(error), EXIT_FAILURE)
    return _serve(engine, config, signals, alive)


def _serve(engine: Engine, config: EngineConfig, signals: "_Signals", alive: AliveFile | None) -> int:
    """Run until told to stop or until something fails; the wire's last words are sent in every case."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what was loaded stays: collections need not look at it again
    signals.engine = engine
    capacity = engine.hello.capacity
    logger.info(
        "ready listen=%s model=%s executor=%s device=%s dtype=%s speculator=%s max_draft_len=%d max_model_len=%d "
        "kv_cache_tokens=%d start_s=%.1f",
        config.listen, engine.hello.model_name, engine.hello.executor, engine.hello.device, engine.hello.dtype,
        engine.hello.speculator, engine.hello.max_draft_len, capacity.max_model_len,
        capacity.num_blocks * capacity.block_size, (time.time_ns() - engine.hello.epoch) / 1e9,
    )  # fmt: skip
    errands: Errands = engine.profiles if alive is None else Touching(alive, engine.profiles, time.monotonic_ns)
    try:
        return engine.core.run(errands)
    except Exception:
        logger.exception("engine failed")
        return EXIT_FAILURE
    finally:
        engine.profiles.close()
        engine.wire.close()
        if alive is not None:
            alive.remove()
        logger.info("stopped")


def _configure_logging(config: EngineConfig) -> None:
    if config.log_format == "json":
        install(config.log_level, JsonLines({"engine": config.engine_id}))
    else:
        text = f"%(asctime)s %(levelname)s engine[{config.engine_id}] %(name)s %(message)s"
        install(config.log_level, logging.Formatter(text))


class _Signals:
    """SIGTERM and SIGINT: the first drains, the second stops. While loading, either ends the process."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.engine: Engine | None = None
        self._drain_timeout_s = drain_timeout_s
        self._is_draining = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.engine is None:
            raise SystemExit(0)
        if self._is_draining:
            self.engine.core.stop()
        else:
            self._is_draining = True
            self.engine.core.drain(self._drain_timeout_s)


def _loading_bar(config: EngineConfig) -> OnProgress:
    """A bar on a terminal, else a line of the log per quarter."""
    is_for_people = sys.stderr.isatty() and config.log_format == "text"
    return _Bar(config.model) if is_for_people else _Lines(config.model)


class _Bar:
    def __init__(self, model: str) -> None:
        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(model, total=None)
        self._is_shown = False

    def __call__(self, done: int, total: int) -> None:
        if not self._is_shown:
            self._is_shown = True
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)
        if done >= total:
            self._progress.stop()


class _Lines:
    def __init__(self, model: str) -> None:
        self._model = model
        self._next_quarter = 1

    def __call__(self, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if quarter >= self._next_quarter:
            self._next_quarter = quarter + 1
            logger.info("loading model=%s percent=%d mib=%d", self._model, 25 * quarter, total >> 20)


def _end(sentence: str, code: int) -> int:
    sys.stderr.write(f"{PROGRAM}: {sentence}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
