"""Settings of a server, and the error for rejected requests."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        name: Name of the model.
        key: Bearer token that clients must send. If `None`, no token is required.
        hosts: Accepted values of the Host header, without port. If `None`, any value is accepted.
        queue: Maximum number of samples that wait for a slot.
        seconds: Time limit per request.
        body: Maximum size of a request body in bytes.
        body_seconds: Time limit to receive a request body.
        prompts: Maximum number of prompts per request.
        samples: Maximum number of samples per prompt.
        stops: Maximum number of stop strings per request.
        stop_length: Maximum number of characters per stop string.
        drain: Seconds to finish running requests when the server stops.
        access_log: Whether to log one line per request.
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
    """Convert an error to text for clients, without local paths."""
    return re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", f"{error}")[:300]


class Refused(Exception):
    """Error that rejects a request.

    Attributes:
        status: HTTP status.
        why: Reason for the client.
        param: Field that caused the error, or `None`.
        code: Error code of OpenAI's API, or `None`.
    """

    def __init__(self, status: int, why: str, param: str | None = None, code: str | None = None):
        super().__init__(why)
        self.status, self.why, self.param, self.code = status, why, param, code

    def body(self) -> dict[str, object]:
        """Return the error as a JSON object of OpenAI's API."""
        error_types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = error_types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.why, "type": error_type, "param": self.param, "code": self.code}}
