"""Count the steps of parsers, so that the same record is refused on every machine, however fast the machine is."""


class TooComplexError(Exception):
    """Error for a record that takes too many steps to read. The error's text is the reason."""


TOO_COMPLEX = "too complex"
"""Rule of the rejects for records that take too many steps."""


class Steps:
    """Counter of the steps that a parser takes for one record.

    `what` names the steps in the message, and `size` is the size of the record. The limit grows in proportion to it.
    """

    def __init__(self, what: str, size: int, *, per_unit: int, at_least: int) -> None:
        self._what = what
        self._limit = size * per_unit + at_least
        self._taken = 0

    @property
    def left(self) -> bool:
        """Whether steps are left."""
        return self._taken < self._limit

    def take(self, number: int) -> None:
        """Count steps. Raises `TooComplexError` above the limit."""
        self._taken += number
        if self._taken > self._limit:
            raise TooComplexError(f"{self._what} takes more than {self._limit:,} steps")
