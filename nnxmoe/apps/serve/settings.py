"""Settings of a server, and the error for rejected requests."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        name: name of the model.
        key: bearer token that clients must send. If None, no token is required.
        hosts: accepted values of the Host header without port. If None, any value is accepted.
        queue: maximum number of samples that wait for a slot.
        seconds: time limit per request.
        body: maximum size of a request body in bytes.
        body_seconds: time limit to receive a request body.
        prompts: maximum number of prompts per request.
        samples: maximum number of samples per prompt.
        stops: maximum number of stop strings.
        stop_length: maximum number of characters per stop string.
        drain: seconds to finish running requests when the server stops.
        access_log: log one line per request.
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
    """Return the text of an error for clients, without local paths."""
    return re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", f"{error}")[:300]


class Refused(Exception):
    """Error for a rejected request.

    Attributes:
        status: HTTP status.
        why: reason, for the client.
        param: field that caused the error, or None.
        code: error code of OpenAI, or None.
    """

    def __init__(self, status: int, why: str, param: str | None = None, code: str | None = None):
        super().__init__(why)
        self.status, self.why, self.param, self.code = status, why, param, code

    def body(self) -> dict[str, object]:
        """Return the error in OpenAI's JSON form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.why, "type": kind, "param": self.param, "code": self.code}}
