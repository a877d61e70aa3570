"""The errors that a user can cause, one class per kind of mistake.

Each message follows one grammar: the name, what it must be, what it is, what to do.
"""


class CrosscutError(Exception):
    """Base of every error that is about the user's input rather than a bug; shown without a traceback."""

    is_told = False
    """Whether another rank shows this error to the user. Then this rank ends without a message."""


class ConfigError(CrosscutError):
    """A run's file or an override asks for something that cannot be."""


class LayoutError(ConfigError):
    """A layout that the model, the batch or the number of processes does not allow."""


class DataError(CrosscutError):
    """Text or token shards that are missing, empty, unreadable or damaged."""


class CheckpointError(CrosscutError):
    """A checkpoint that is missing, incomplete or made by another model."""


class RankFailure(Exception):  # noqa: N818 - it tells what happened
    """A rank ended with an exception or a signal; the message is that rank's traceback."""


class RunStopped(Exception):  # noqa: N818 - it tells what happened
    """A run did what a scheduler asked for: it has stopped and written a checkpoint to go on from."""


class TrainingError(CrosscutError):
    """A run that cannot go on: a loss or a gradient is no longer a finite number, or replicas of a parameter differ."""
