"""What the DNS names among the engines' addresses mean at the moment.

Owns resolving, off the event loop, and what is kept when it fails. Never connects. Used by `frontend.engine_pool`, which asks again
and again: a headless service or a scaled container has engines that come and go.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protocol.endpoints import is_loopback

Resolve = Callable[[str, int], Awaitable[list[str]]]  # (name, port) -> IP addresses; raises OSError

RESOLVE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


def is_name(address: str) -> bool:
    """Whether the address has a DNS name, which may mean several engines, others tomorrow."""
    if not address.startswith("tcp://"):
        return False
    try:
        ipaddress.ip_address(_host_and_port(address)[0])
    except ValueError:
        return True
    return False


@dataclass(slots=True)
class Names:
    """The DNS names among the addresses, and what each meant when it was last resolved."""

    names: tuple[str, ...]
    resolve: Resolve
    stay_here: bool = (
        False  # only what is on this machine may be used: the wire is plain, and nobody allowed it elsewhere
    )
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by name, of those that cannot be resolved now

    async def refresh(self) -> None:
        """Ask for all of them at once. What cannot be resolved keeps the addresses it had."""
        await asyncio.gather(*(self._refresh(name) for name in self.names))

    def addresses(self) -> tuple[str, ...]:
        """All that is known, each once."""
        return tuple(dict.fromkeys(address for name in self.names for address in self.found.get(name, ())))

    async def _refresh(self, name: str) -> None:
        host, port = _host_and_port(name)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                hosts = await self.resolve(host, port)
        except TimeoutError:
            self._failed(name, f"the name server said nothing for {RESOLVE_TIMEOUT_S:g} s")
        except (OSError, UnicodeError) as error:
            self._failed(name, getattr(error, "strerror", None) or str(error))
        else:
            outside = next((one for one in hosts if not is_loopback(one)), None)
            if self.stay_here and outside is not None:
                self._failed(name, f"it means {outside}, another machine, to which --allow-plaintext-tcp is not given")
                return
            if self.failures.pop(name, None) is not None:
                logger.info("engine name resolved again name=%s", name)
            self.found[name] = tuple(f"tcp://{f'[{one}]' if ':' in one else one}:{port}" for one in sorted(hosts))

    def _failed(self, name: str, reason: str) -> None:
        if name not in self.failures:
            logger.warning("engine name not resolved name=%s reason=%r", name, reason)
        self.failures[name] = reason


async def resolve_by_system(host: str, port: int) -> list[str]:
    """All addresses of a name, in a thread of the loop's. IPv6 only where there is no IPv4: a host with both is one engine."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, []).append(str(address[0]))
    return list(dict.fromkeys(by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or []))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
