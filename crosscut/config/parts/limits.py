"""Numbers that ranks must divide, such as the number of attention heads."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Number that the number of tensor ranks must divide."""

    setting: str
    """Key of the config that holds the number."""
    number: int
    subject: str
    """Words for the number, with `{}` in its place, as the subject of a sentence."""
    may_share: bool = False
    """Whether several ranks may also share one, so that the number of ranks may be a multiple of the number."""
    over_context: bool = False
    """Whether context ranks must divide what is left for one tensor rank. They exchange tokens for a part of it."""
    when: str = ""
    """Condition under which the limit applies, with a space before it."""

    @property
    def name(self) -> str:
        """Setting and number, as in "`model.num_heads` (12)"."""
        return f"`{self.setting}` ({self.number})"

    def allows(self, ranks: int) -> bool:
        """Whether this number of tensor ranks is possible."""
        return self.number % ranks == 0 or (self.may_share and ranks % self.number == 0)

    def reason_against(self, ranks: int) -> str:
        """Clause that says why this number of tensor ranks is impossible."""
        over = "or shared evenly by" if self.may_share else "evenly over"
        return f"{self.subject.format(self.number)} cannot be divided {over} {ranks} tensor ranks"
