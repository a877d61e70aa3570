"""Errors that a user can cause, with one class per kind of mistake.

Every message follows one grammar: the name, what it must be, what it is, what to do.
"""


class CrosscutError(Exception):
    """Base of all errors that are caused by the user's input rather than a bug. The command line shows such an error
    without a traceback.
    """

    is_told = False
    """Whether another rank shows this error to the user, so that this rank ends without a message."""


class OutputClosed(CrosscutError):  # noqa: N818 - the name describes an event
    """Output whose reader has gone, as in `crosscut plan --list | head`. The command line ends without a message."""


class ConfigError(CrosscutError):
    """A setting that is unknown, missing or impossible."""


class LayoutError(ConfigError):
    """A layout that does not fit the model, the batch or the number of processes."""


class DataError(CrosscutError):
    """Text or token shards that are missing, empty, unreadable or damaged."""


class CheckpointError(CrosscutError):
    """A checkpoint that is missing, incomplete or from another model."""


class DamagedError(CrosscutError):
    """Files that are damaged, truncated or changed since they were written. The command line exits with a separate
    status, so that a script can fetch the files again.
    """


class DamagedDataError(DamagedError, DataError):
    """Text or token shards that are damaged."""


class DamagedCheckpointError(DamagedError, CheckpointError):
    """A checkpoint or a published model that is damaged."""


class RankFailure(Exception):  # noqa: N818 - the name describes an event
    """Failure of a rank: an exception or a signal has ended it. The message is the rank's traceback."""


class RunStopped(Exception):  # noqa: N818 - the name describes an event
    """Stop of a run that has written a checkpoint to resume from. A scheduler requested the stop or, if `interrupted`,
    the user pressed Ctrl-C.
    """

    def __init__(self, message: str, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted


class RunHung(Exception):  # noqa: N818 - the name describes an event
    """Hang of a run. The ranks have exited, and the run can resume from its last checkpoint. If `may_restart`, the run
    should be restarted immediately.
    """

    def __init__(self, *, may_restart: bool) -> None:
        super().__init__("the run hung")
        self.may_restart = may_restart


class GenerationError(CrosscutError):
    """A text that cannot be continued or scored, because the model's logits are not finite or because there is too
    little memory.
    """


class TrainingError(CrosscutError):
    """A run that cannot continue, because a loss or gradient is not finite or the replicas of a parameter differ."""
