"""Check that loaded weights are finite. A single NaN in a weight turns every output of the model into NaN."""

from collections import Counter

import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config import CheckpointError, ModelConfig
from crosscut.config.system.wording import counted
from crosscut.model import GPT
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.state.parameters import local_offsets, local_part
from crosscut.pretrained.families import weights_of

_ELEMENTS_AT_ONCE = 1 << 22


@torch.no_grad()
def require_finite(model: GPT, place: object, *, is_published: bool) -> None:
    """Raise the same `CheckpointError` on all ranks if a weight contains NaN or infinity. The message names the tensor
    and `place`, from which the weights were loaded. If `is_published` is true, the weights come from a published model,
    and the message uses the tensor's published name.

    Every rank must call this. Each rank checks its own part of each parameter. Communication: for each parameter, the
    offsets of the rank's part, and the number of values in this part that are not finite. A rank sends zeros for
    parameters of other pipeline stages.
    """
    parameters = dict(model.named_parameters())
    described = list(describe(model.config).parameters())
    names = [parameter.name for parameter in described]  # of all stages of a pipeline
    rows = torch.zeros(len(names), max(len(parameter.shape) for parameter in described) + 2, dtype=torch.int64)
    for index, name in enumerate(names):
        if name in parameters:
            parameter = parameters[name]
            values = index, count_not_finite(local_part(parameter)), *local_offsets(parameter)
            rows[index, : len(values)] = torch.tensor(values)
    rows = rows.to(model.mesh.device)
    for axis in model.mesh.axes:
        rows = all_gather(rows, axis, 0)
    counts = Counter[str]()
    # Ranks that hold the same part report the same row, which counts once.
    for index, count, *_ in dict.fromkeys(map(tuple, rows.tolist())):
        counts[names[index]] += count
    counts = +counts
    if found := [name for name in names if name in counts]:
        shown = _published_name(model.config, found[0]) if is_published else found[0]
        remedy = "Download the model again." if is_published else "Use an earlier checkpoint."
        if next(iter(parameters.values())).dtype is torch.float16:
            remedy += " If float16 is too narrow for this model, choose another precision."
        raise not_finite(place, shown, counts[found[0]], remedy, num_more=len(found) - 1)


def _published_name(config: ModelConfig, name: str) -> str:
    """Return the names of the published tensors from which a parameter is assembled, joined by "or". For the tensors of
    experts, the first and the last name.
    """
    weight = next(weight for weight in weights_of(config) if weight.name == name)
    names = [source.name for source in weight.sources]
    return f"{names[0]}` to `{names[-1]}" if weight.stacked and len(names) > 1 else "` or `".join(names)


def count_not_finite(tensor: Tensor) -> int:
    """Number of elements that are NaN or infinite.

    If the sum of all elements is finite, the result is 0. The sum reads each element once and allocates no memory. If
    the sum is not finite, the elements are counted, because the sum of large finite elements may overflow.
    """
    if tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite():
        return 0
    return sum(int((~part.isfinite()).sum()) for part in tensor.flatten().split(_ELEMENTS_AT_ONCE))


def not_finite(place: object, name: str, count: int, remedy: str, *, num_more: int = 0) -> CheckpointError:
    """Return the error for weights that are not finite: `count` elements of the tensor `name`, and at least one element
    in each of `num_more` other tensors.
    """
    values, are = ("1 value", "is") if count == 1 else (f"{count:,} values", "are")
    others = counted(num_more, "other tensor also has", "other tensors also have")
    more = f", and {others} such values" if num_more else ""
    return CheckpointError(
        f"`{place}` must hold finite weights, but {values} in `{name}` {are} not finite (NaN or infinity){more}. "
        f"{remedy}"
    )
