"""Web application: its routes take JSON, and return JSON or a stream of events."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from crosscut.config.conventions import LOOK
from crosscut.serving.desk import Desk, PartT
from crosscut.serving.protocol.answers import Json
from crosscut.serving.protocol.embeddings import ServedEncoder
from crosscut.serving.protocol.model import ServedModel, unknown_model
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.protocol.requests import ServedDecoder
from crosscut.serving.web.endpoints import Endpoint
from crosscut.serving.web.guard import Guard

_PAGE = Path(__file__).parent / "page"

_PATHS = "/v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, /health and the page at /"

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_application(
    served: ServedModel,
    desk: Desk[PartT],
    endpoints: Mapping[str, Endpoint],
    *,
    key: str | None,
    names: Iterable[str],
) -> Starlette:
    """Build the application that serves a model. The `endpoints` use the model. They pass the texts of requests to the
    computing thread through the `desk`.

    `key` and `names` decide which clients are allowed; see `Guard`.
    """
    handlers = _Handlers(served, desk)
    application = Starlette(
        routes=[
            Route("/", handlers.page),
            Route("/page/{name}", handlers.page),
            Route("/health", handlers.health),
            Route("/v1/models", handlers.models),
            Route("/v1/models/{name:path}", handlers.model),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        ],
        middleware=[Middleware(Guard, key=key, names=names)],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _not_found,
            ClientDisconnect: _left,
        },
        lifespan=handlers.opened,
    )
    application.router.redirect_slashes = False  # a redirect has no body, and a client that posts would not follow it
    return application


class _Handlers(Generic[PartT]):
    """Handlers of the routes that do not use the model."""

    def __init__(self, served: ServedModel, desk: Desk[PartT]) -> None:
        self._served = served
        self._desk: Desk[PartT] = desk
        self._files = {file.name: file for file in (LOOK, *_PAGE.iterdir())}

    @asynccontextmanager
    async def opened(self, _: Starlette) -> AsyncIterator[None]:
        self._desk.open()
        yield

    async def page(self, request: HttpRequest) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HTTPException(404)
        return FileResponse(self._files[name], headers=_PAGE_HEADERS)

    async def health(self, _: HttpRequest) -> Response:
        stopping = self._desk.is_stopping
        figures = {"rows": self._desk.num_rows, "running": self._desk.num_running, "waiting": self._desk.num_waiting}
        told = {"status": "stopping" if stopping else "ok", "model": self._served.name}
        return JSONResponse(told | figures, 503 if stopping else 200)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self._served)]})

    async def model(self, request: HttpRequest) -> Response:
        if (name := request.path_params["name"]) != self._served.name:
            raise unknown_model(name, self._served.name)
        return JSONResponse(_model(self._served))


def _model(served: ServedModel) -> Json:
    """Description of the model in OpenAI's form, with additional fields for the page."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "crosscut",
        "window": served.window,
        "chat": isinstance(served, ServedDecoder) and served.can_chat,
        "embeddings": isinstance(served, ServedEncoder),
    }


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status, error.headers)


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    """Response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"The method must be {allowed} at {request.url.path}, but is {request.method}."
    else:
        message = f"The path must be one of {_PATHS}, but is {request.url.path}."
    refusal = Refusal(message, status=error.status_code)
    return JSONResponse(refusal.body, refusal.status, error.headers)


async def _left(_: HttpRequest, _error: Exception) -> Response:
    """Response after the client has disconnected. No client receives it."""
    return Response(status_code=499)
