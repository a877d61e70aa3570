"""The served model, and the field `model` of requests, which names it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from crosscut.serving.protocol.fields import Fields, RequestKind, shown
from crosscut.serving.protocol.refusals import Refusal


@dataclass(frozen=True, kw_only=True)
class ServedModel(ABC):
    """The served model, with everything that is needed to check requests."""

    name: str
    window: int
    """Maximum number of tokens of a text (of a decoder: of prompt and continuation together). If a decoder's `slide` is
    set, the number of tokens that the model sees at once."""
    tokenizer: Path
    vocab_size: int
    """Number of ids that both the model and the tokenizer know. The tokenizer may have further tokens, which the model
    cannot read."""
    created: int
    """Start time of the server, in seconds since 1970."""

    @abstractmethod
    def load(self, kind: RequestKind) -> None:
        """Load what it takes to read requests of this kind."""


def require_model(fields: Fields, served: str) -> None:
    """Raise `Refusal` if the field `model` does not name the `served` model."""
    name = fields.text("model")
    if name is None:
        fields.refuse("model", f"be the model that is served (`{served}`)")
    if name != served:
        raise unknown_model(name, served)


def unknown_model(name: str, served: str) -> Refusal:
    """Return the refusal of a request for the model `name`. The server only has the model `served`."""
    return Refusal(
        f"`model` must be the model that is served (`{served}`), but is {shown(name)}.",
        status=404,
        field="model",
        code="model_not_found",
    )
