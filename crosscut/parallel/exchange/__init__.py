"""Exchange of positions that ranks share: the positions of an image along one direction, or the tokens of a sequence.

- `plan`: positions that ranks hold and fetch, and the messages that follow from them
- `operators`: `fetched` and its conjugate `summed`
"""

from crosscut.parallel.exchange.operators import fetched, summed
from crosscut.parallel.exchange.plan import ExchangePlan, Piece, Range

__all__ = ["ExchangePlan", "Piece", "Range", "fetched", "summed"]
