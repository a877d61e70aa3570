"""Loop of every rank of a server: receive the news from the first rank, then write one more token of every text."""

from crosscut.generation import Decoder
from crosscut.parallel.collectives import FirstRankLine
from crosscut.serving.desk import Desk


def write_texts(decoder: Decoder, desk: Desk | None) -> None:
    """Write what is asked for at the first rank's `desk` until it is over; None on the other ranks.

    Sends what is new, eight bytes where nothing is, from the first rank to all before every step, and every
    `desk.HEARTBEAT` seconds where there is nothing to write.
    """
    line = FirstRankLine()
    while True:
        news = line.share(None if desk is None else desk.take(idle=decoder.is_idle))
        if news is not None:
            for number in news.cancelled:
                decoder.cancel(number)
            numbers = [decoder.add(order.prompt, order.sampling, sample=order.sample) for order in news.orders]
            if desk is not None:
                desk.began(numbers)
            if news.end:
                break
        if not decoder.is_idle:
            pieces = decoder.step()
            if desk is not None:
                desk.deliver(pieces)
    line.close()
