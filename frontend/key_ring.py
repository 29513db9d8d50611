"""Where a frontend's keys come from, and taking in newer ones while it runs.

Owns loading both key files, the environment's key, and reloading: at SIGHUP, and by itself once a file has changed and stays
as it is, because who mounts secrets into containers, or runs several frontends under `drafthouse serve`, can send no signal. Bad
new files change nothing: the keys before stay, and the log says why. Built by `frontend.__main__`.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

from frontend.admin import AdminKeys
from frontend.api_keys import VARIABLE, ApiKeys
from frontend.config import FrontendConfig
from frontend.gate import Gate
from frontend.rate_limit import RateLimits

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 5.0
_Looks = tuple[tuple[int, int, int] | None, ...]


class KeyRing:
    """The keys of one frontend. `gate` and `admin` see every change."""

    def __init__(self, config: FrontendConfig, environment: Mapping[str, str]) -> None:
        """Raises ValueError with a sentence for keys that cannot be used."""
        self._config = config
        self._single = environment.get(VARIABLE)
        keys, self.admin = self._load()
        limits = {
            "--max-requests-per-key": config.max_requests_per_key,
            "--requests-per-minute-per-key": config.requests_per_minute_per_key,
        }
        for option, value in limits.items():
            if value is not None and not keys:
                raise ValueError(f"{option} works only with API keys: give --api-key-file, or a key in {VARIABLE}")
        self.gate = Gate(keys, RateLimits(config.max_requests_per_key, config.requests_per_minute_per_key))
        self._seen = self._loaded = self._look()

    def reload(self) -> None:
        """Take in what the files hold now. Never raises."""
        self._loaded = self._look()
        try:
            keys, admin = self._load()
        except ValueError as error:
            logger.error("keys not reloaded reason=%r", str(error))
            return
        self.gate.keys.take(keys)
        self.admin.take(admin)
        self.gate.limits.keep(keys.identities())
        logger.info("keys reloaded api_keys=%d admin_keys=%d", len(keys), len(admin.digests))

    async def watch(self, interval_s: float = LOOK_INTERVAL_S) -> None:
        """Reload at SIGHUP and what has changed, until cancelled."""
        if self._config.api_key_file is None and self._config.admin_key_file is None:
            return  # and SIGHUP means what it always does
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        while True:
            await asyncio.sleep(interval_s)
            self.look_again()

    def look_again(self) -> None:
        """Reload if a file has changed and is now as at the last look: one that is being written is left to its writer."""
        before, self._seen = self._seen, self._look()
        if self._seen == before != self._loaded:
            self.reload()

    def _load(self) -> tuple[ApiKeys, AdminKeys]:
        keys = ApiKeys.load(self._config.api_key_file, self._single)
        admin = AdminKeys.load(self._config.admin_key_file)
        keys.check_apart(admin)
        return keys, admin

    def _look(self) -> _Looks:
        return tuple(_state(path) for path in (self._config.api_key_file, self._config.admin_key_file))


def _state(path: str | None) -> tuple[int, int, int] | None:
    """Changes with the file's content. None for no file, and for one that is not there."""
    if path is None:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
