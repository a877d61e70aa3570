"""Paths of the endpoints that use the model. Every server has all these paths. A path that the served model does not
support answers with a refusal.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from crosscut.serving.protocol.refusals import Refusal

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

Endpoint = Callable[[Request], Awaitable[Response]]


def refusing(message: str, *, code: str) -> Endpoint:
    """Return an endpoint that refuses every request with this message."""

    async def refuse(_: Request) -> Response:
        raise Refusal(message, code=code)

    return refuse
