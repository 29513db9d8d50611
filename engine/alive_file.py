"""A file that says that the step loop turns, for health checks of an engine, which has no HTTP.

Owns the file: absent until the engine can be reached, touched by the step thread every few seconds, idle or busy, removed
when the engine stops in order. A thread that hangs in a device or a lock touches nothing, which a probe of the port would not
show (and the wire counts a connection that does not speak ZeroMQ as a refused message). Never fails a step. Built by
engine.__main__ when --alive-file is given; without it nothing here runs.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from engine.core import Errands

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0  # a check that allows a minute is off by little, and an idle engine wakes up rarely
_INTERVAL_NS = int(INTERVAL_S * 1e9)


class AliveFile:
    """The file itself."""

    def __init__(self, path: str) -> None:
        """Removes what an earlier life left: it must not vouch for this one. Raises ValueError when it cannot be written."""
        self._path = Path(path)
        self._is_failing = False
        try:
            self._path.touch()
            self._path.unlink()
        except OSError as error:
            raise ValueError(f"--alive-file {path} cannot be written: {error.strerror}") from error

    def touch(self) -> None:
        """Set its time to now. A failure is logged once and is the health check's to act on."""
        try:
            self._path.touch()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("alive_file_not_written path=%s reason=%r", self._path, error.strerror)
            self._is_failing = True

    def remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("alive_file_not_removed path=%s reason=%r", self._path, error.strerror)


class Touching:
    """Core's `Errands` around others: touches the file between steps, and wakes an idle loop in order to."""

    def __init__(self, file: AliveFile, errands: Errands, now_ns: Callable[[], int]) -> None:
        """`now_ns`: the clock of the core."""
        self._file = file
        self._errands = errands
        self._now_ns = now_ns
        self._due_ns = now_ns()

    @property
    def deadline_ns(self) -> int | None:
        other_ns = self._errands.deadline_ns
        return self._due_ns if other_ns is None else min(self._due_ns, other_ns)

    def run(self) -> None:
        self._errands.run()
        now_ns = self._now_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + _INTERVAL_NS
            self._file.touch()
