"""Words for tensors and messages, for the terminal and for the picture."""

from crosscut.config.system.wording import short
from crosscut.planner.messages.collective import Collective
from crosscut.planner.showing.shown import ShownStep, Tensor, message_bytes

_UNITS = ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " bytes"))


def in_units(number: float) -> str:
    """Bytes with up to three significant digits, such as `8.39 MB`."""
    return short(number, _UNITS)


def sizes(shape: tuple[int, ...]) -> str:
    """Shape such as `4,096 x 1,024`."""
    return " x ".join(f"{size:,}" for size in shape)


def shape_in_words(tensor: Tensor) -> str:
    """Shape on one rank, with the whole shape and its cut if ranks divide the tensor, and whether it is a summand."""
    cut = f" of {sizes(tensor.whole)}, cut by {tensor.cut}" if tensor.cut else ""
    return f"{sizes(tensor.shape)}{cut}{', a summand' if tensor.is_summand else ''}"


def weights_in_words(step: ShownStep) -> str:
    """Names of the modules whose weights a step uses, such as `mlp.expand`."""
    return ", ".join(dict.fromkeys(weight.name.rpartition(".")[0] for weight in step.weights))


def of_message(message: Collective) -> str:
    """A message such as `all_reduce over 4 tensor ranks: 4,194,304 elements, 8.39 MB`."""
    times = f"{message.count:,} x " if message.count > 1 else ""
    size = f"{message.elements:,} elements, {in_units(message_bytes(message))}"
    return f"{times}{message.operation} over {message.ranks} {message.axis} ranks: {size}"
