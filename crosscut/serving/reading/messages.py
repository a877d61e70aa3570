"""Messages between the server and a process that reads requests: a table in JSON, followed by bytes.

The bytes are the body of a request or, in the other direction, the token ids of the prompts. Ids are not part of the
JSON, because parsing millions of numbers would hold the server's interpreter for a large part of a second.
"""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from crosscut.config.system.records import from_json, to_json
from crosscut.serving.protocol.embeddings import EmbeddingRequest, ServedEncoder, read_embedding
from crosscut.serving.protocol.fields import RequestKind
from crosscut.serving.protocol.model import ServedModel
from crosscut.serving.protocol.requests import Request, ServedDecoder, read_chat, read_completion

_ID: Literal["I"] = "I"
"""Type of an id, as in `array`: four bytes."""


def read_request(kind: RequestKind, body: object, served: ServedModel) -> Request | EmbeddingRequest:
    """Read the parsed body of a request. Raises `Refusal`."""
    if isinstance(served, ServedEncoder):
        return read_embedding(body, served)
    assert isinstance(served, ServedDecoder)
    return {RequestKind.CHAT: read_chat, RequestKind.COMPLETION: read_completion}[kind](body, served)


def pack_served(served: ServedModel) -> dict[str, object]:
    """Convert the served model to a table."""
    return {"is_encoder": isinstance(served, ServedEncoder), "served": to_json(served)}


def unpack_served(table: Mapping[str, object]) -> ServedModel:
    """Return the served model of a table."""
    kind = ServedEncoder if table["is_encoder"] else ServedDecoder
    return from_json(kind, table["served"])


def pack_request(request: Request | EmbeddingRequest) -> tuple[dict[str, object], bytes]:
    """Convert a request to a table and the bytes of its ids."""
    table = {**vars(request), "prompts": [len(prompt) for prompt in request.prompts]}
    if isinstance(request, Request):
        table["sampling"] = vars(request.sampling)
    return table, b"".join(array(_ID, prompt).tobytes() for prompt in request.prompts)


def num_id_bytes(table: Mapping[str, Any]) -> int:
    """Number of bytes of the ids that follow the table of a request."""
    prompts: list[int] = table["prompts"]
    return array(_ID).itemsize * sum(prompts)


def unpack_request(table: Mapping[str, Any], content: bytes) -> Request | EmbeddingRequest:
    """Return the request of a table and the bytes of its ids."""
    ids, start, prompts = memoryview(content).cast(_ID), 0, []
    for length in table["prompts"]:
        prompts.append(tuple(ids[start : start + length]))
        start += length
    kind: type[Request | EmbeddingRequest] = Request if "sampling" in table else EmbeddingRequest
    return replace(from_json(kind, {**table, "prompts": []}), prompts=tuple(prompts))
