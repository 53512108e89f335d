"""A small HTTP client over asyncio's streams, which can stop reading or go away at any point."""

import asyncio
import dataclasses
import json
from typing import Any, Self

SECONDS = 120.0  # of any wait


@dataclasses.dataclass
class Reply:
    """Status, headers and, once it was read, the body."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Connection:
    """One connection, for one request; closed without a word at the end of the block."""

    def __init__(self, port: int):
        self._port, self._reply = port, Reply(0, {})

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def send(self, path: str, body: Any, headers: dict[str, str]) -> None:
        """A POST of bytes or JSON; a GET for None."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        async with asyncio.timeout(SECONDS):
            await self._writer.drain()

    async def head(self) -> Reply:
        """Status and headers; also the body if it is not a stream."""
        async with asyncio.timeout(SECONDS):
            first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        self._reply = Reply(int(first.split()[1]), headers)
        if "content-length" in headers:
            async with asyncio.timeout(SECONDS):
                self._reply.body = await self._reader.readexactly(int(headers["content-length"]))
        return self._reply

    async def part(self) -> bytes:
        """The next chunk of a stream; empty at its end."""
        async with asyncio.timeout(SECONDS):
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            return (await self._reader.readexactly(size + 2))[:-2]


async def ask(port: int, path: str, body: Any, headers: dict[str, str]) -> Reply:
    """The whole reply to one request."""
    async with Connection(port) as connection:
        await connection.send(path, body, headers)
        reply = await connection.head()
        while "content-length" not in reply.headers and (part := await connection.part()):
            reply.body += part
        return reply
