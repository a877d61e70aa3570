"""Main loop of every rank of a server: receive the changes from the first rank, then generate one more token of every
text.
"""

from crosscut.generation import Decoder
from crosscut.parallel.collectives import FirstRankLine
from crosscut.serving.desk import Desk
from crosscut.serving.news import News, Order


def write_texts(decoder: Decoder, desk: Desk | None) -> None:
    """Generate the texts that arrive at the first rank's `desk` until the server ends. On all other ranks, `desk` is
    None.

    Before every step, the first rank sends the changes to all ranks, or 8 bytes if there are none. While there is
    nothing to generate, it sends 8 bytes every `desk.HEARTBEAT` seconds. An error in one text is delivered to the
    request that asked for the text, and the loop continues.

    On several ranks, an error inside a forward pass that texts share ends the server, because the other ranks wait for
    this rank's part of a sum. A request has little influence on such a pass: its checks are made before (`_begin`), a
    pass has a limited number of prompt tokens, and the cache, which grows with the texts, grows before the pass, where
    all ranks agree (`Decoder.step`). The remaining causes are broken devices, lost ranks, and a device that is so full
    that the pass of a long prompt does not fit.
    """
    line = FirstRankLine(News.to_json, News.from_json)
    while True:
        news = line.share(None if desk is None else desk.take(idle=decoder.is_idle))
        if news is not None:
            for number in news.cancelled:
                decoder.cancel(number)
            begun = [_begin(decoder, order) for order in news.orders]
            if desk is not None:
                desk.began(begun)
            if news.end:
                break
        if not decoder.is_idle:
            pieces = decoder.step()
            if desk is not None:
                desk.deliver(pieces)
    line.close()


def _begin(decoder: Decoder, order: Order) -> int | Exception:
    """Number of a new text, or the error that the decoder raises for it. All ranks find the same error, because they
    make the same checks.
    """
    try:
        return decoder.add(order.prompt, order.sampling, sample=order.sample)
    except Exception as error:
        return error
