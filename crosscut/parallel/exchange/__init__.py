"""Exchange of positions that ranks share: the positions of an image along one direction, or the tokens of a sequence.

- `plan`: positions that ranks hold and fetch, and the messages that follow from them
- `operators`: `fetched`, also in two halves between which a rank computes, and its conjugate `summed`
"""

from crosscut.parallel.exchange.operators import Flight, fetched, finish_fetch, start_fetch, summed
from crosscut.parallel.exchange.plan import ExchangePlan, Piece, Range

__all__ = ["ExchangePlan", "Flight", "Piece", "Range", "fetched", "finish_fetch", "start_fetch", "summed"]
