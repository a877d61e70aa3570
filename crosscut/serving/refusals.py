"""Refusals of requests that cannot be answered: a status and OpenAI's error form."""

from typing import Any


class Refusal(Exception):  # noqa: N818 - it tells what happened
    """A request that is not answered, and why; becomes the response."""

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        """The HTTP status."""
        self.field = field
        """The request's field that is at fault, where it is one."""
        self.code = code
        """A word for programs, OpenAI's where there is one."""
        self.headers = {"Retry-After": "1"} if retry else {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}
