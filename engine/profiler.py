"""Profiles on request: what to record, for how long at most, and the one file that is left.

Owns the conversation with admins (through frontends), the limits and the file. A profile is cut into windows of whole steps
and each is added to the file at once, because stopping torch's profiler holds the interpreter for 5 to 20 us per recorded
operation: a long window would silence the engine's heartbeats and cost every frontend its engine. Never harms a request: a
profile that fails is thrown away and said so. Runs on the step thread between steps, as core's `Errands`.
"""

import contextlib
import gzip
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from engine.handover import ProfileLine
from protocol.messages import Profile, ProfileAction, ProfileOutcome, ProfileReply

logger = logging.getLogger(__name__)

MAX_PROFILE_S = 60.0
MAX_TRACE_BYTES = 64 << 20  # before compression: some 280 000 operations
WINDOW_BYTES = 4 << 20  # aim for a window; 17 000 operations, 0.1 to 0.35 s to stop and save
MAX_WINDOW_STEPS = 64
STALE_S = 600.0  # an unfinished file this old was left by an engine that was killed

NO_DIRECTORY = "profiles are off: start the engine with --profile-dir DIRECTORY"
NO_MODEL = "a simulated engine (--executor sim) runs no model: there is nothing to profile"


class ProfileError(Exception):
    """Nothing was started, or nothing is left. The text is a sentence for the admin."""

    outcome = ProfileOutcome.FAILED


class ProfileConflict(ProfileError):
    outcome = ProfileOutcome.CONFLICT


class ProfileRefused(ProfileError):
    outcome = ProfileOutcome.REFUSED


@dataclass(frozen=True)
class Note:
    """What became of a request. `path` is set when a profile ended."""

    message: str
    path: Path | None = None
    num_steps: int = 0


class Recorder(Protocol):
    """One window at a time; `engine.recorder.TorchRecorder`."""

    @property
    def num_steps(self) -> int: ...

    def begin(self) -> None: ...

    def end(self, path: Path) -> None: ...


class Profiles(Protocol):
    """What answers: a `Profiler`, or the reason why this engine has none."""

    @property
    def deadline_ns(self) -> int | None: ...

    def start(self) -> Note: ...

    def stop(self) -> Note: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class NoProfiles:
    """Refuses with the reason."""

    deadline_ns: int | None = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self) -> Note:
        raise ProfileRefused(self._reason)

    def stop(self) -> Note:
        raise ProfileRefused(self._reason)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class TraceFile:
    """A Chrome trace that grows by windows: compressed, under a hidden name until it is whole."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.num_bytes = 0  # before compression
        self._part = path.with_name(f".{path.name}.part")
        self._window = path.with_name(f".{path.name}.window.part")
        self._base: bytes | None = None
        self._gzip = gzip.open(self._part, "wb", compresslevel=1)  # noqa: SIM115  # closed by keep and discard

    def add(self, save: Callable[[Path], None]) -> int:
        """Take what `save` writes as one more window; returns its size in bytes."""
        save(self._window)
        fields = msgspec.json.decode(self._window.read_bytes(), type=dict[str, msgspec.Raw])
        events = bytes(fields.pop("traceEvents")).strip()[1:-1].strip()
        base = bytes(fields.get("baseTimeNanoseconds", b"0"))  # what the events' times are relative to
        if self._base is None:
            self._base = base
            header = msgspec.json.encode(fields)
            self._gzip.write(header[:-1] + b',"traceEvents":[' + events)
        elif base != self._base:
            raise ProfileError("the profiler's time base moved during the profile; start it again")
        elif events:
            self._gzip.write(b",\n" + events)
        self.num_bytes += len(events)
        return len(events)

    def keep(self) -> Path:
        """Finish the file and give it its name."""
        self._gzip.write(b"]}")
        self._gzip.close()
        self._part.rename(self.path)
        self._window.unlink(missing_ok=True)
        return self.path

    def discard(self) -> None:
        """Leave nothing, also on a full disk."""
        for clean in (self._gzip.close, self._part.unlink, self._window.unlink):
            with contextlib.suppress(OSError):
                clean()


class _Session:
    """One profile that is running."""

    def __init__(self, file: TraceFile, deadline_ns: int) -> None:
        self.file = file
        self.deadline_ns = deadline_ns
        self.num_steps = 0  # in finished windows
        self.window_steps = 1  # how long the current window shall be; the first tells what a step takes


class Profiler:
    """At most one profile. `start` and `stop` raise ProfileError; after any error nothing is recorded."""

    def __init__(
        self,
        recorder: Recorder,
        directory: Path,
        engine_id: str,
        now_ns: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Makes the directory. Raises ValueError when it cannot be written to."""
        self._recorder = recorder
        self._directory = directory.absolute()
        self._prefix = f"drafthouse-{engine_id}-"
        self._now_ns = now_ns
        self._wall_s = wall_s
        self._session: _Session | None = None
        self._ended: Note | ProfileError | None = None  # by itself, not yet asked for
        self._prepare_directory()

    @property
    def deadline_ns(self) -> int | None:
        return None if self._session is None else self._session.deadline_ns

    def start(self) -> Note:
        if self._session is not None:
            raise ProfileConflict("a profile is running already: end it with POST /stop_profile")
        self._ended = None
        session = _Session(self._new_file(), self._now_ns() + int(MAX_PROFILE_S * 1e9))
        with self._all_or_nothing(session):
            self._recorder.begin()
        self._session = session
        logger.info("profile_started path=%s", session.file.path)
        return Note(
            f"recording until POST /stop_profile, for at most {MAX_PROFILE_S:g} s and {MAX_TRACE_BYTES >> 20} MiB of trace"
        )

    def stop(self) -> Note:
        if self._session is not None:
            return self._finish(self._session, "")
        ended, self._ended = self._ended, None
        if ended is None:
            raise ProfileConflict("no profile is running: begin one with POST /start_profile")
        if isinstance(ended, ProfileError):
            raise ended
        return ended

    def tick(self) -> None:
        """Between steps: end the window, or the profile, that is full. Never raises."""
        session = self._session
        if session is None:
            return
        try:
            if self._now_ns() >= session.deadline_ns:
                self._ended = self._finish(session, f"; it ended by itself after {MAX_PROFILE_S:g} s")
            elif self._recorder.num_steps >= session.window_steps:
                self._next_window(session)
        except ProfileError as error:
            self._ended = error

    def close(self) -> None:
        """The engine ends: what was recorded is kept."""
        if self._session is None:
            return
        try:
            self._finish(self._session, "; the engine ended")
        except ProfileError as error:
            logger.warning("profile_lost reason=%r", str(error))

    def _next_window(self, session: _Session) -> None:
        with self._all_or_nothing(session):
            num_steps, num_bytes = self._end_window(session)
            if session.file.num_bytes < MAX_TRACE_BYTES:
                session.window_steps = min(MAX_WINDOW_STEPS, max(1, WINDOW_BYTES * num_steps // max(1, num_bytes)))
                self._recorder.begin()
                return
            self._ended = self._keep(session, f"; it ended by itself at {MAX_TRACE_BYTES >> 20} MiB of trace")

    def _finish(self, session: _Session, why: str) -> Note:
        with self._all_or_nothing(session):
            self._end_window(session)
            return self._keep(session, why)

    def _end_window(self, session: _Session) -> tuple[int, int]:
        """The steps and bytes of the window that ends here."""
        num_steps = self._recorder.num_steps
        num_bytes = session.file.add(self._recorder.end)
        session.num_steps += num_steps
        return num_steps, num_bytes

    def _keep(self, session: _Session, why: str) -> Note:
        path = session.file.keep()
        self._session = None
        logger.info("profile_written path=%s steps=%d", path, session.num_steps)
        return Note(f"{session.num_steps} steps recorded{why}", path, session.num_steps)

    @contextlib.contextmanager
    def _all_or_nothing(self, session: _Session) -> Iterator[None]:
        """What fails inside ends the profile: no file, no recording. Raises ProfileError."""
        try:
            yield
        except Exception as error:
            self._session = None
            session.file.discard()
            logger.exception("profile_failed path=%s", session.file.path)
            raise ProfileError(f"the profile failed and left nothing: {error}") from error

    def _new_file(self) -> TraceFile:
        seconds, milliseconds = divmod(int(self._wall_s() * 1000), 1000)
        stamp = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(seconds))}.{milliseconds:03d}Z"
        try:
            return TraceFile(self._directory / f"{self._prefix}{stamp}.json.gz")
        except OSError as error:
            raise ProfileError(f"--profile-dir {self._directory} cannot be written to: {error.strerror}") from error

    def _prepare_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in self._directory.glob(f".{self._prefix}*.part"):
                if self._wall_s() - left.stat().st_mtime > STALE_S:
                    left.unlink(missing_ok=True)
            TraceFile(self._directory / f"{self._prefix}start.json.gz").discard()
        except OSError as error:
            raise ValueError(f"--profile-dir {self._directory} cannot be written to: {error.strerror}") from error


class ProfileDesk:
    """Core's `Errands`: answers the questions of the line, and lets the profile end by itself."""

    def __init__(self, line: ProfileLine, profiles: Profiles, engine_id: str, epoch: int) -> None:
        self._line = line
        self._profiles = profiles
        self._engine_id = engine_id
        self._epoch = epoch

    @property
    def deadline_ns(self) -> int | None:
        return self._profiles.deadline_ns

    def run(self) -> None:
        for frontend_id, question in self._line.take_questions():
            self._line.answer(frontend_id, self._reply(question))
        self._profiles.tick()

    def close(self) -> None:
        """The engine steps no more."""
        self._profiles.close()

    def _reply(self, question: Profile) -> ProfileReply:
        try:
            note = self._profiles.start() if question.action is ProfileAction.START else self._profiles.stop()
        except ProfileError as error:
            return ProfileReply(self._engine_id, self._epoch, question.nonce, error.outcome, str(error))
        path = None if note.path is None else str(note.path)
        return ProfileReply(
            self._engine_id, self._epoch, question.nonce, ProfileOutcome.DONE, note.message, path, note.num_steps
        )
