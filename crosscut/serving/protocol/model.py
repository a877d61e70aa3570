"""The field `model` of requests, which names the served model."""

from crosscut.serving.protocol.fields import Fields, shown
from crosscut.serving.protocol.refusals import Refusal


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
