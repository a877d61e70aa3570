"""Reach of an operator along one direction of an image: the range of inputs that a range of outputs reads.

Every spatial layer has one reach per direction, and no other knowledge of ranks. The exchange of halos follows from the
reach, and the backward pass from the exchange. This module imports no torch.
"""

from typing import NamedTuple, Protocol

from crosscut.parallel.exchange.plan import Range


class Reach(Protocol):
    """Reach of an operator along one direction. Plans are cached by reach, so it is hashable."""

    def __hash__(self) -> int: ...

    def length(self, size: int, /) -> int:
        """Return the number of outputs for `size` inputs. Less than 1 if the operator has no output."""

    def reads(self, outputs: Range) -> Range:
        """Return the inputs that a non-empty range of outputs reads. The range may leave the image."""


class Window(NamedTuple):
    """Reach of a convolution or of pooling: output o reads the `kernel` inputs o stride - before + j dilation."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    """Padding before the image."""
    after: int = 0
    """Padding after the image."""
    is_ceil: bool = False
    """Whether a last window that reaches behind the padding has an output (`ceil_mode`)."""

    @property
    def extent(self) -> int:
        """Number of positions from the first to the last input of an output."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, size: int, /) -> int:
        """Return the number of outputs, as PyTorch counts them."""
        room = size + self.before + self.after - self.extent
        if not self.is_ceil:
            return room // self.stride + 1
        outputs = -(-room // self.stride) + 1
        return outputs - ((outputs - 1) * self.stride >= size + self.before)

    def reads(self, outputs: Range) -> Range:
        """Return the inputs from the first window's start to the last window's end."""
        start, last = (o * self.stride - self.before for o in (outputs.start, outputs.stop - 1))
        return Range(start, last + self.extent)

    def readers(self, inputs: Range, outputs: Range) -> Range:
        """Return those of a range of outputs whose windows overlap a range of inputs."""
        first = -((self.extent - 1 - inputs.start - self.before) // self.stride)
        last = (inputs.stop - 1 + self.before) // self.stride
        return Range(first, last + 1).overlap(outputs)


class Spread(NamedTuple):
    """Reach of a transposed convolution: input i adds to the outputs i stride - padding + j dilation."""

    kernel: int
    stride: int
    dilation: int
    padding: int
    more: int
    """Additional outputs at the end (`output_padding`)."""

    @property
    def extent(self) -> int:
        """Number of positions from the first to the last output of an input."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, size: int, /) -> int:
        """Return the number of outputs."""
        return (size - 1) * self.stride - 2 * self.padding + self.extent + self.more

    def reads(self, outputs: Range) -> Range:
        """Return the inputs that add to the outputs. With gaps between the inputs' outputs, the range has one more
        input on a side, so that its outputs enclose `outputs`.
        """
        first, last = outputs.start + self.padding, outputs.stop - 1 + self.padding
        start = min(-((self.extent - 1 - first) // self.stride), first // self.stride)
        stop = max(last // self.stride, -((self.extent - 1 - last) // self.stride))
        return Range(start, stop + 1)

    def first(self, start: int) -> int:
        """Return the first output to which input `start` adds."""
        return start * self.stride - self.padding


class Listed(NamedTuple):
    """Reach of an operator that lists the inputs of each output, such as a change of size."""

    of_outputs: tuple[Range, ...]

    def length(self, _size: int, /) -> int:
        """Return the number of outputs."""
        return len(self.of_outputs)

    def reads(self, outputs: Range) -> Range:
        """Return the inputs from the first to the last that the outputs read."""
        of_outputs = self.of_outputs[outputs.start : outputs.stop]
        return Range(min(each.start for each in of_outputs), max(each.stop for each in of_outputs))

    def read_by(self, inputs: Range) -> Range:
        """Return the outputs from the first to the last that read one of the inputs."""
        found = [output for output, read in enumerate(self.of_outputs) if read.overlap(inputs).size]
        return Range(found[0], found[-1] + 1) if found else Range(0, 0)


def bins(num: int, size: int) -> Listed:
    """Return the reach of adaptive pooling: output o reads the inputs from floor(o L / M) up to ceil((o + 1) L / M),
    where L is `size`, the number of inputs, and M is `num`, the number of outputs.
    """
    return Listed(tuple(Range(o * size // num, -(-(o + 1) * size // num)) for o in range(num)))
