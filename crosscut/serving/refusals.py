"""Refusals of invalid requests, with an HTTP status and OpenAI's error form."""

from typing import Any


class Refusal(Exception):  # noqa: N818 - the name describes an event
    """A refused request with the reason. The application converts it to the HTTP response."""

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """HTTP status."""
        self.field = field
        """Path of the invalid field. None if the reason is not a single field."""
        self.code = code
        """Machine-readable code. This is OpenAI's code if OpenAI has one for the case."""
        self.headers = {"Retry-After": "1"} if retry else {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}
