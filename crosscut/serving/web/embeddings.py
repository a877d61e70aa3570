"""Endpoint that embeds texts, for servers whose model is an encoder."""

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from crosscut.evaluation.embeddings.embedder import Embedded
from crosscut.serving.desk import Desk, RequestJob
from crosscut.serving.protocol.answers import embedding_answer
from crosscut.serving.protocol.embeddings import EmbeddingRequest, ServedEncoder
from crosscut.serving.protocol.fields import RequestKind
from crosscut.serving.web.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, Endpoint, refusing
from crosscut.serving.web.reading import RequestReading
from crosscut.serving.web.waiting import Readers, until_gone

_WRITERS = 2
"""Number of answers that are written at a time. Writing the numbers of a large answer takes a second."""


def embedding_endpoints(served: ServedEncoder, desk: Desk[Embedded]) -> dict[str, Endpoint]:
    """Return the endpoints of an encoder, keyed by path."""
    reading, writers = RequestReading(served, lambda: desk.num_running > 0), Readers(_WRITERS)

    async def embeddings(request: HttpRequest) -> Response:
        asked = await reading.read(request, RequestKind.EMBEDDING)
        assert isinstance(asked, EmbeddingRequest)
        vectors = await until_gone(_embedded(asked, desk), request.receive)
        write = partial(embedding_answer, asked, served, vectors)
        return Response(await until_gone(writers.run(write), request.receive), media_type="application/json")

    why = f"`{served.name}` must predict the next token to write text, but is an encoder. Use {EMBEDDINGS}."
    refuse = refusing(why, code="no_text")
    return {COMPLETIONS: refuse, CHAT: refuse, EMBEDDINGS: embeddings}


async def _embedded(asked: EmbeddingRequest, desk: Desk[Embedded]) -> list[Tensor]:
    """Return the embeddings of the request's texts. If the client disconnects, the texts that are not embedded yet are
    cancelled.
    """
    job: RequestJob[Embedded] = desk.submit(list(asked.orders()))
    try:
        found = {which: one.embedding async for which, one in job}
    finally:
        desk.withdraw(job)
    vectors = [found[which] for which in range(len(asked.prompts))]
    return [vector for vector in vectors if vector is not None]
