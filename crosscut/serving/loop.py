"""Main loop of every rank of a server: receive the changes from the first rank, then generate one more token of every
text.
"""

from crosscut.generation import Decoder
from crosscut.parallel.collectives import FirstRankLine
from crosscut.serving.desk import Desk


def write_texts(decoder: Decoder, desk: Desk | None) -> None:
    """Generate the texts that arrive at the first rank's `desk` until the server ends. On all other ranks, `desk` is
    None.

    Before every step, the first rank sends the changes to all ranks, or 8 bytes if there are none. While there is
    nothing to generate, it sends 8 bytes every `desk.HEARTBEAT` seconds.
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
