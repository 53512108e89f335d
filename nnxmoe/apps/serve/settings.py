"""Settings of a server, and the error that a client gets."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """``name``: of the model. ``key``: what clients must send as a bearer token; None: no key. ``hosts``: accepted
    values of the Host header without its port; None: any.

    Bounds: ``queue`` samples wait for a slot, ``seconds`` per request, ``body`` bytes and ``body_seconds`` of a request
    body, ``prompts`` and ``samples`` per prompt in one request, ``stops`` strings of ``stop_length`` characters,
    ``drain`` seconds to finish running requests when the server stops. ``access_log``: one line per request.
    """

    name: str
    key: str | None = None
    hosts: frozenset[str] | None = None
    queue: int = 256
    seconds: float = 600.0
    body: int = 4 << 20
    body_seconds: float = 30.0
    prompts: int = 128
    samples: int = 16
    stops: int = 16
    stop_length: int = 256
    drain: float = 30.0
    access_log: bool = True


def public(error: object) -> str:
    """Text of an error for clients, without local paths."""
    return re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", f"{error}")[:300]


class Refused(Exception):
    """A request that is not served: the HTTP ``status``, why, and the field at fault."""

    def __init__(self, status: int, why: str, param: str | None = None, code: str | None = None):
        super().__init__(why)
        self.status, self.why, self.param, self.code = status, why, param, code

    def body(self) -> dict[str, object]:
        """The error as JSON in OpenAI's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.why, "type": kind, "param": self.param, "code": self.code}}
