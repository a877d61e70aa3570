"""Functions that a command line names, as in `package.module:function`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from crosscut.config import ConfigError


@dataclass(frozen=True)
class NamedFunction:
    """Function that is imported by its name on each rank, when the rank calls it."""

    option: str
    """Option of the command line, for messages."""
    name: str
    """Name as in `package.module:function`."""
    folder: str
    """Folder in which the module is looked for first."""

    def __call__(self, *arguments: object) -> Any:
        """Import and call the function."""
        return self.load()(*arguments)

    def load(self) -> Callable[..., Any]:
        """Import the function. Raises `ConfigError` if the name has another form, or if there is no such module or
        function. Other errors of the module are raised unchanged.
        """
        module, colon, function = self.name.partition(":")
        if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise ConfigError(
                f"`{self.option}` must be a name such as package.module:function, but is `{self.name}`. Give the name "
                "of a module, a colon, and the name of a function in the module."
            )
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        try:
            found = getattr(import_module(module), function, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module itself imports something that is not installed
            raise ConfigError(
                f"`{self.option}` must name a module that can be imported, but there is no module `{error.name}`. "
                "Start the command in the folder of the package, or install the package."
            ) from None
        if not callable(found):
            what = "has no function of that name" if found is None else "has another thing of that name"
            raise ConfigError(
                f"`{self.option}` must name a function, but `{module}` {what}: `{function}`. Check the name."
            )
        return found  # type: ignore[no-any-return]
