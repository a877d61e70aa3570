"""What a user is told by a call that must fail."""

from collections.abc import Callable

import pytest


def refusal(kind: type[Exception], call: Callable[..., object], /, *arguments: object, **options: object) -> str:
    """Text of the error of this kind that `call(*arguments, **options)` raises."""
    with pytest.raises(kind) as raised:
        call(*arguments, **options)
    return str(raised.value)
