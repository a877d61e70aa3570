"""Refusals of requests, with an HTTP status and a body in the form of OpenAI's errors."""

import secrets
import traceback

from crosscut.config import CrosscutError
from crosscut.config.system.terminal import echo


class Refusal(Exception):  # noqa: N818 - the name describes an event
    """Refusal of a request, with the reason. The application converts it to an HTTP response."""

    def __init__(
        self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        self.message = _encodable(message)
        super().__init__(self.message)
        self.status = status
        """HTTP status."""
        self.field = None if field is None else _encodable(field)
        """Path of the invalid field. None if the reason is not a single field."""
        self.code = code
        """Machine-readable code. OpenAI's code is used if OpenAI has one for the case."""
        self.headers = {"Retry-After": "1"} if retry else {}

    def to_json(self) -> dict[str, object]:
        """Convert the refusal to the arguments that make it."""
        return {
            "message": self.message,
            "status": self.status,
            "field": self.field,
            "code": self.code,
            "retry": bool(self.headers),
        }

    @property
    def body(self) -> dict[str, object]:
        """The refusal as JSON, in the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}}


def require_bytes(text: str, field: str, most_tokens: int, longest: int) -> None:
    """Raise `Refusal` if a text is so long that it cannot have at most `most_tokens` tokens. `longest` is the number of
    bytes of the longest token.

    The text is not encoded first, because encoding a long text takes seconds. The bytes are those that the client sent,
    also if the tokenizer would drop some of them.
    """
    size, most = len(text.encode()), most_tokens * longest
    if size > most:
        raise Refusal(
            f"`{field}` must have at most {most:,} bytes ({most_tokens:,} tokens, times {longest} bytes of the longest "
            f"token), but has {size:,}. Shorten the text.",
            code="context_length_exceeded",
            field=field,
        )


def failure_of(error: Exception) -> Refusal:
    """Return the refusal of a request that failed with `error` through no fault of the client. The refusal has the
    status 500 and a number that identifies the failure.

    The error is printed to the server's log under the same number. Only the log shows the traceback.
    """
    number = f"{secrets.randbelow(10**8):08}"
    if isinstance(error, CrosscutError):
        told = logged = str(error)
    else:
        told = "The server failed on this request."
        logged = "".join(traceback.format_exception(error)).rstrip()
    echo(f"crosscut: Failure {number}: {_encodable(logged)}", err=True)
    told += f" The server's log describes the failure under the number {number}."
    return Refusal(told, status=500, code="failure")


def _encodable(text: str) -> str:
    """Escape the lone surrogates in a text. JSON can express them in a client's values, but UTF-8 cannot encode
    them.
    """
    return text.encode("utf-8", "backslashreplace").decode()
