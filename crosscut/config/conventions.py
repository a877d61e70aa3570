"""What rooms that never see each other agree on."""

from pathlib import Path
from types import MappingProxyType

IGNORED = -100
"""A target that adds nothing to the loss: written by `data`, passed over by `parallel`."""

CONFIG_FILE = "config.toml"
"""The resolved run, in a run's folder."""

CHECKPOINTS_FOLDER = "checkpoints"
"""The checkpoints, in a run's folder."""

TOKENS_FOLDER = "tokens"
"""The token shards, in a run's folder."""

INITIAL_FOLDER = "initial"
"""What a run keeps of the published model that it starts from, but for the weights, in its folder."""

LOOK = Path(__file__).parent / "look.css"
"""The style that every page begins with."""

VOCABULARY_MULTIPLE = 128
"""Entries per rank are a multiple of this, so that the logit product has an efficient shape (paper, section 5.1)."""

LOGITS_AT_ONCE = MappingProxyType({"cpu": 1 << 24, "cuda": 1 << 29})
"""Logits that the loss keeps on one rank at a time: as many tokens as fit make a chunk. On the CPU 64 MiB in float32.
A GPU adds a chunk's gradient to that of the whole embedding at the cost of some hundred tokens' products, so there a
chunk has thousands."""


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The vocabulary as it is cut: the next multiple of 128 x tensor ranks. Padded entries take no probability."""
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def default_loss_chunk(local_vocab_size: int, num_tokens: int, *, device: str = "cpu") -> int:
    """Tokens whose logits the loss computes together: `num_tokens` in even parts, each a multiple of 128 where it can.

    With `local_vocab_size` vocabulary entries on a rank. A device that is not known yet (`auto`) counts as the CPU.
    """
    most = max(1, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) // local_vocab_size)
    most -= most % 128 if most > 128 else 0
    even = -(-num_tokens // -(-num_tokens // most)) if num_tokens else 1
    return min(most, -(-even // 128) * 128)


OVERLAPPED_ELEMENTS = 1 << 22
"""Elements of a piece that is worth a collective of its own, 8 MiB in bfloat16: smaller ones are over before a product
beside them is."""


def num_pieces(sequences: int, elements: int) -> int:
    """In how many pieces a product under sequence parallelism runs, so that one is sent while another is multiplied.

    Two halves of the micro-batch's `sequences`, where each has enough of the `elements` that are sent; else one.
    """
    return 2 if sequences % 2 == 0 and elements >= 2 * OVERLAPPED_ELEMENTS else 1
