"""A collector that takes everything and keeps nothing, in a process of its own: `python -m tests.bench.blackhole`.

Prints its port. Speaks as much of HTTP/1.1 as an OTLP exporter needs.
"""

import asyncio
import re

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            if found is None:
                return
            await reader.readexactly(int(found[1]))
            writer.write(_ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(swallow, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
