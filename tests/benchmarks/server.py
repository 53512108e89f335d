"""The server under load: many clients at once, and not only kind ones.

    python -m tests.benchmarks.server [--clients 64] [--seconds 60] [--slots 8]

Starts `nnxmoe serve demo` in a process of its own. Clients stream, read slowly, go away in the middle, score prompts,
and send malformed, oversized and unsupported bodies and wrong keys. Every complete answer is compared with the one that
the idle server gave. Prints counts, times and memory as Markdown; exits with 1 if anything was lost.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nnxmoe.convert.files.hub import DEMO
from tests.benchmarks.http_client import Connection, Reply, ask
from tests.support.serving import TOOL_TEMPLATE

KEY = "a key for this benchmark"
PROMPTS = ("Once upon a time", "The fox", "What is", "A boat", "The capital of France", "Mia went to the river")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# What a client does next, and how often of a hundred and fifty times.
KINDS = {
    "stream": 30, "whole": 20, "two samples": 5, "echo": 5, "slow reader": 5, "leaves a stream": 10, "leaves": 10,
    "malformed": 4, "oversized": 3, "unsupported": 4, "wrong key": 4, "schema": 25, "tool": 15, "streamed tool": 10,
}  # fmt: skip
REFUSED = {"malformed": 400, "oversized": 413, "unsupported": 400, "wrong key": 401}


@dataclasses.dataclass
class Found:
    """Figures of a load. ``first``: seconds to the first token of streams; ``gaps``: between chunks; ``memory``: bytes
    of the server by time."""

    seconds: float = 0.0
    done: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    busy: int = 0
    tokens: int = 0
    first: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    whole: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


class Load:
    """Clients of one server on ``port``. ``limit``: the largest body that it takes."""

    def __init__(self, port: int, name: str, key: str | None, limit: int, pid: int | None = None):
        self.port, self.name, self.limit, self.pid, self.found = port, name, limit, pid, Found()
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._has_key, self._expected = key is not None, dict[tuple[str, int], str]()

    async def run(self, clients: int, seconds: float) -> Found:
        """Asks the idle server first, where the first requests of their kind wait for a program, then all clients at
        once, and waits until it is idle again."""
        for prompt in PROMPTS:
            for tokens in (8, 24):
                reply = await self._post(COMPLETION, self._body(prompt, tokens))
                self._expected[prompt, tokens] = reply.json()["choices"][0]["text"]
        for count in (1, 2, 9):  # at once, since each number of rows has a program of its own
            if count <= clients:
                await asyncio.gather(*(self._score(random.Random(i)) for i in range(count)))
        await self._do("two samples", random.Random(0))
        self.found = Found()
        started = time.monotonic()
        watch = asyncio.ensure_future(self._watch())
        await asyncio.gather(*(self._client(random.Random(i), started + seconds) for i in range(clients)))
        self.found.seconds = time.monotonic() - started
        watch.cancel()
        await self._drained()
        return self.found

    async def _client(self, draw: random.Random, end: float) -> None:
        kinds = [kind for kind in KINDS if self._has_key or kind != "wrong key"]
        while time.monotonic() < end:
            (kind,) = draw.choices(kinds, [KINDS[kind] for kind in kinds])
            try:
                if await self._do(kind, draw):
                    self.found.done[kind] += 1
            except Exception as error:
                self.found.faults.append(f"{kind}: {error!r:.200}")

    async def _do(self, kind: str, draw: random.Random) -> bool:
        """One request; False: the server is busy, which is an answer too."""
        if kind in REFUSED:
            return await self._refused(kind, draw)
        if kind in ("echo", "schema"):
            return await (self._score(draw) if kind == "echo" else self._schema(draw))
        if kind in ("tool", "streamed tool"):
            return await self._tool(draw, stream=kind != "tool")
        prompt, tokens = draw.choice(PROMPTS), draw.choice((8, 24))
        body, started = self._body(prompt, tokens), time.monotonic()
        if kind in ("whole", "two samples"):
            count = 2 if kind == "two samples" else 1
            reply = await self._post(COMPLETION, body | {"n": count})
            if await self._busy(reply):
                return False
            self._check([choice["text"] for choice in reply.json()["choices"]], prompt, tokens, count)
            self.found.whole.append(time.monotonic() - started)
            self.found.tokens += reply.json()["usage"]["completion_tokens"]
            return True
        async with Connection(self.port) as connection:
            await connection.send(COMPLETION, body | {"stream": kind != "leaves"}, self._headers)
            if kind == "leaves":
                await asyncio.sleep(draw.random() * 0.3)
                return True
            reply = await connection.head()
            if await self._busy(reply):
                return False
            if kind == "leaves a stream":
                await connection.part()
                return True
            return await self._read(connection, prompt, tokens, started, 0.05 if kind == "slow reader" else 0.0)

    async def _read(self, connection: Connection, prompt: str, tokens: int, started: float, pause: float) -> bool:
        text, last = "", started
        while part := await connection.part():
            now = time.monotonic()
            if not pause:
                (self.found.first if last == started else self.found.gaps).append(now - last)
            text, last = text + part.decode(), now
            await asyncio.sleep(pause)
        *events, end = text.split("\n\n")[:-1]
        assert end == "data: [DONE]", end
        found = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        self._check(["".join(choice["text"] for choice in found)], prompt, tokens, 1)
        assert found[-1]["finish_reason"], found[-1]
        self.found.tokens += tokens
        return True

    async def _score(self, draw: random.Random) -> bool:
        prompt = " ".join(draw.choices(PROMPTS, k=3))
        reply = await self._post(COMPLETION, self._body(prompt, 1) | {"echo": True, "logprobs": 1})
        if await self._busy(reply):
            return False
        logprobs = reply.json()["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == reply.json()["usage"]["total_tokens"]
        return True

    async def _schema(self, draw: random.Random) -> bool:
        """JSON of a schema, drawn; cut only where there is no room for more."""
        fields = {name: {"type": draw.choice(("integer", "boolean", "null"))} for name in draw.sample("abcdef", 3)}
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        schema["x-guidance"] = {"whitespace_pattern": ""}
        body = self._body(draw.choice(PROMPTS), 48) | {"min_tokens": 0, "temperature": 1, "guided_json": schema}
        reply = await self._post(COMPLETION, body)
        if await self._busy(reply):
            return False
        choice = reply.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["text"]).keys() == fields.keys(), choice
        else:
            assert choice["finish_reason"] == "length" and choice["text"].startswith("{"), choice
        return True

    async def _tool(self, draw: random.Random, stream: bool) -> bool:
        """A call of a tool with arguments of its own."""
        fields = {name: {"type": draw.choice(("integer", "boolean", "null"))} for name in draw.sample("abcdef", 2)}
        schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"model": self.name, "messages": [{"role": "user", "content": draw.choice(PROMPTS)}], "tools": tools}
        body |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 64, "stream": stream}
        reply = await ask(self.port, CHAT, body, self._headers)
        if await self._busy(reply):
            return False
        if stream:
            *events, end = reply.body.decode().split("\n\n")[:-1]
            assert end == "data: [DONE]", end
            choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        else:
            choices = reply.json()["choices"]
            calls = choices[0]["message"].get("tool_calls", ())
        if (why := choices[-1]["finish_reason"]) == "tool_calls":
            assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["f"], calls
            arguments = "".join(call["function"]["arguments"] for call in calls)
            assert json.loads(arguments).keys() == fields.keys(), arguments
        else:
            assert why == "length", choices
        return True

    async def _refused(self, kind: str, draw: random.Random) -> bool:
        good = self._body("The fox", 8)
        texts = [b"", b"{", b"[" * 10_000, json.dumps(good).encode()[:-1], b"\xff" * 100]
        body: Any = {
            "malformed": draw.choice(texts),
            "oversized": b" " * (self.limit + draw.choice((1, self.limit))),
            "unsupported": good | {draw.choice(("tools", "functions", "audio")): [{"type": "function"}]},
            "wrong key": good,
        }[kind]
        headers = {"Authorization": "Bearer wrong"} if kind == "wrong key" else self._headers
        reply = await ask(self.port, draw.choice((COMPLETION, CHAT)), body, headers)
        assert reply.status == REFUSED[kind] and reply.json()["error"]["message"], (reply.status, reply.body[:200])
        return True

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {"model": self.name, "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 0}

    async def _post(self, path: str, body: Any) -> Reply:
        return await ask(self.port, path, body, self._headers)

    async def _busy(self, reply: Reply) -> bool:
        if reply.status == 429:
            self.found.busy += 1
            await asyncio.sleep(0.2)
            return True
        assert reply.status == 200, (reply.status, reply.body[:200])
        return False

    def _check(self, texts: list[str], prompt: str, tokens: int, count: int) -> None:
        assert texts == [self._expected[prompt, tokens]] * count, (prompt, texts)

    async def _drained(self) -> None:
        """Waits until no slot is taken. A slot that is still taken after ten seconds is lost."""
        for _ in range(100):
            text = (await ask(self.port, "/metrics", None, self._headers)).body.decode()
            names = ("slots_running", "samples_waiting", "samples_admitted")
            left = {name: int(re.findall(rf"^nnxmoe_{name} (\d+)", text, re.M)[0]) for name in names}
            if not any(left.values()):
                return
            await asyncio.sleep(0.1)
        self.found.faults.append(f"lost slots: {left}")

    async def _watch(self) -> None:
        while self.pid is not None:
            self.found.memory.append(resident(self.pid))
            await asyncio.sleep(0.5)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) * 1024


def percentiles(values: list[float]) -> str:
    """The 50th, 95th and 99th in milliseconds, and how many values there are."""
    if not values:
        return "none"
    ordered = sorted(values)
    at: Callable[[float], float] = lambda share: 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return f"{at(0.5):.0f}, {at(0.95):.0f}, {at(0.99):.0f} ms of {len(values)}"


def lines(found: Found, clients: int, slots: int) -> Iterator[str]:
    """The figures in Markdown."""
    yield f"{clients} clients for {found.seconds:.0f} s, {slots} slots, load of the machine {os.getloadavg()[0]:.1f}"
    yield f"- requests: {sum(found.done.values())}: {', '.join(f'{n} {kind}' for kind, n in found.done.most_common())}"
    yield f"- refused because the queue was full: {found.busy}"
    yield f"- tokens per second of complete answers: {found.tokens / found.seconds:.0f}"
    yield f"- time to the first token (50th, 95th, 99th): {percentiles(found.first)}"
    yield f"- between chunks of a stream: {percentiles(found.gaps)}"
    yield f"- whole answers: {percentiles(found.whole)}"
    if len(found.memory) > 3:
        quarter, last = found.memory[len(found.memory) // 4], found.memory[-1]
        yield f"- memory: {quarter / 1e6:.0f} MB after a quarter of the time, {last / 1e6:.0f} MB at the end"
    yield f"- faults: {len(found.faults)}"
    yield from (f"  - {fault}" for fault in found.faults[:10])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.server")
    for name, default in (("--clients", 64), ("--seconds", 60), ("--slots", 8), ("--queue", 256)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args(arguments)
    limit = 1 << 16
    command = ["--port", "0", "--slots", options.slots, "--capacity", 256, "--queue", options.queue]
    # bfloat16 may choose other tokens beside other requests
    command += ["--max-body", limit, "--no-access-log", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(shutil.copytree(DEMO, Path(folder, "demo")))
        (demo / "chat_template.jinja").write_text(TOOL_TEMPLATE)
        return _run([sys.executable, "-m", "nnxmoe", "serve", str(demo), *map(str, command)], options, limit)


def _run(line: list[str], options: argparse.Namespace, limit: int) -> int:
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ | {"NNXMOE_API_KEY": KEY})
    assert process.stderr is not None
    try:
        for said in process.stderr:
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", said):
                break
        else:
            sys.exit("the server did not start")
        load = Load(int(found.group(1)), "demo", KEY, limit, process.pid)
        figures = asyncio.run(load.run(options.clients, options.seconds))
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    finally:
        process.kill()
    print("\n".join(lines(figures, options.clients, options.slots)))
    print(f"- stopped by SIGTERM in {time.monotonic() - started:.1f} s with status {status}")
    return 1 if figures.faults or status else 0


if __name__ == "__main__":
    sys.exit(main())
