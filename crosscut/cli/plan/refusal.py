"""Refusal of options that belong to another mode of a command, such as `--rank` without `--dry-run`. Each mode is a
click command of its own.
"""

import click
from click.core import ParameterSource

from crosscut.config import ConfigError


def refuse_options(command: click.Command, *others: click.Command, message: str, hidden: bool) -> None:
    """Make a command refuse the parameters that only the commands in `others` have. The refusal states the reason.
    click alone would call the parameters unknown.

    `message` is the text of the `ConfigError`. `{option}` and `{value}` stand for the option and the value that the
    user typed. The command's help shows the refused options unless `hidden` is true.
    """
    known = {parameter.name for parameter in command.params}
    for parameter in (parameter for other in others for parameter in other.params):
        if parameter.name not in known:
            known.add(parameter.name)
            command.params.append(_refused(parameter, message, hidden=hidden))


def _refused(parameter: click.Parameter, message: str, *, hidden: bool) -> click.Parameter:
    def refuse(context: click.Context, typed: click.Parameter, value: object) -> None:
        if context.get_parameter_source(str(typed.name)) is not ParameterSource.DEFAULT:
            option = typed.opts[0] if isinstance(typed, click.Option) else "RUN.toml"
            raise ConfigError(message.format(option=option, value=_told(value)))

    names = [str(parameter.name), *parameter.opts]
    if not isinstance(parameter, click.Option):
        return click.Argument(names[:1], nargs=parameter.nargs, required=False, expose_value=False, callback=refuse)
    return click.Option(
        names,
        type=parameter.type,
        is_flag=parameter.is_flag,
        default=parameter.default,
        show_default=parameter.show_default,
        metavar=parameter.metavar,
        help=parameter.help,
        hidden=hidden,
        expose_value=False,
        callback=refuse,
    )


def _told(value: object) -> str:
    if value is True:
        return "given"
    return " ".join(value) if isinstance(value, tuple) else str(value)
