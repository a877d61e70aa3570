"""Conventions shared by rooms that never import each other."""

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
"""Files of the published model that a run starts from, without the weights, in a run's folder."""

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


BUCKET_BYTES = 32 << 20
"""Bytes of a bucket of gradients, which is sent to the other data ranks when it is full."""

PIECE_ELEMENTS = 1 << 24
"""Elements of each moment in a piece of the optimizer's step from host memory: 64 MiB in float32, which a bus of 25
GB/s moves in 3 ms."""

AMPERE = (8, 0)
"""NVIDIA's first compute capability with bfloat16 products, and the first that FlashAttention runs on."""


def takes_shared_heads(compute: str, *, head_size: int, dropout: float, capability: tuple[int, int]) -> bool:
    """Whether attention on a GPU runs in a kernel that takes fewer heads of keys and values than of queries.

    FlashAttention's does, which is for types of two bytes (`compute`, by torch's name) from Ampere on, and heads of at
    most 256 elements; on GPUs with less shared memory (8.6 to 8.9 and 12.x) not for all above 192. PyTorch's
    memory-efficient kernel, which takes the rest but float64, asks for as many heads of each (up to PyTorch 2.13:
    `can_use_mem_efficient_attention`). Elsewhere keys and values are repeated, since a kernel that keeps the scores
    would be left.
    """
    if compute not in ("bfloat16", "float16") or capability < AMPERE or head_size > 256:
        return False
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return not is_small or head_size <= 192 or (head_size > 224 and not dropout)


def keeps_scores(compute: str, *, capability: tuple[int, int]) -> bool:
    """Whether a GPU has no attention kernel for a type but PyTorch's plain one, which keeps s s scores per head."""
    return compute == "float64" or (compute == "bfloat16" and capability < AMPERE)


OVERLAPPED_ELEMENTS = 1 << 22
"""Elements of a piece that is worth a collective of its own, 8 MiB in bfloat16: smaller ones are over before a product
beside them is."""


def num_pieces(sequences: int, elements: int) -> int:
    """In how many pieces a product under sequence parallelism runs, so that one is sent while another is multiplied.

    Two halves of the micro-batch's `sequences`, where each has enough of the `elements` that are sent; else one. Half
    of each rank's tokens, once gathered, would be a stretch of the sequence per rank: the weight's gradient would take
    its input with a copy, or add up once per stretch.
    """
    return 2 if sequences % 2 == 0 and elements >= 2 * OVERLAPPED_ELEMENTS else 1
