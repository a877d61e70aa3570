"""Place in a user's code, for messages."""

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import crosscut

_INNER = tuple(str(Path(package.__file__ or "").parent) for package in (torch, crosscut))


def told_place() -> str:
    """Describe the innermost line that is neither PyTorch's nor Crosscut's, and the innermost module that runs."""
    frame: FrameType | None = sys._getframe(1)
    line, modules = "", []
    while frame is not None:
        file = frame.f_code.co_filename
        if not line and not file.startswith(_INNER):
            line = f"at {file}:{frame.f_lineno}"
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return f"{line}, outside of the modules"
    names = {id(module): name for name, module in modules[-1].named_modules()}
    return f"{line}, in the module `{names.get(id(modules[0])) or type(modules[0]).__name__}`"
