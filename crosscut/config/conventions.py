"""Conventions shared by packages that never import each other."""

from pathlib import Path
from types import MappingProxyType

IGNORED = -100
"""Target that is excluded from the loss. `data` writes it and `parallel` skips it."""

CONFIG_FILE = "config.toml"
"""File of the resolved config, in the run's folder."""

CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the checkpoints, in the run's folder."""

TOKENS_FOLDER = "tokens"
"""Folder of the token shards, in the run's folder."""

INITIAL_FOLDER = "initial"
"""Folder with the files of the published model that the run starts from, without the weights, in the run's folder."""

LOOK = Path(__file__).parent / "look.css"
"""Style sheet that every HTML page includes."""

VOCABULARY_MULTIPLE = 128
"""Each rank's share of the vocabulary is a multiple of this, so that the logit product has an efficient shape (paper,
section 5.1)."""

LOGITS_AT_ONCE = MappingProxyType({"cpu": 1 << 24, "cuda": 1 << 29})
"""Maximum number of logits that the loss holds on one rank at a time; it decides how many tokens form a chunk. On the
CPU they take 64 MiB in float32. On a GPU, adding a chunk's gradient to the gradient of the whole embedding costs as
much as the products of some hundred tokens, so GPU chunks have thousands of tokens."""


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Vocabulary size after padding: the next multiple of 128 x tensor ranks. Padded entries get no probability."""
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def default_loss_chunk(local_vocab_size: int, num_tokens: int, *, device: str = "cpu") -> int:
    """Number of tokens whose logits the loss computes together.

    The `num_tokens` are split into equal chunks, each a multiple of 128 tokens where possible. `local_vocab_size` is
    the number of vocabulary entries on one rank. A device of "auto" is treated as the CPU.
    """
    most = max(1, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) // local_vocab_size)
    most -= most % 128 if most > 128 else 0
    even = -(-num_tokens // -(-num_tokens // most)) if num_tokens else 1
    return min(most, -(-even // 128) * 128)


BUCKET_BYTES = 32 << 20
"""Size of a gradient bucket in bytes. A full bucket is sent to the other data ranks."""

PIECE_ELEMENTS = 1 << 24
"""Number of elements of each moment in one piece, if the optimizer steps from host memory. In float32, a piece has 64
MiB, which a bus of 25 GB/s moves in 3 ms."""

AMPERE = (8, 0)
"""First NVIDIA compute capability with bfloat16 products, and the first that FlashAttention supports."""


def takes_shared_heads(compute: str, *, head_size: int, dropout: float, capability: tuple[int, int]) -> bool:
    """Whether a GPU's attention kernel accepts fewer key and value heads than query heads.

    FlashAttention accepts this. It needs a 2-byte element type (`compute`, by torch's name), compute capability 8.0
    (Ampere) or newer, and a head size of at most 256. GPUs with less shared memory (8.6 to 8.9 and 12.x) support head
    sizes above 192 only in part. In all other cases except float64, PyTorch uses its memory-efficient kernel, which
    requires equal numbers of heads (up to PyTorch 2.13: `can_use_mem_efficient_attention`). There the keys and values
    are repeated, because PyTorch would otherwise fall back to a kernel that keeps all scores in memory.
    """
    if compute not in ("bfloat16", "float16") or capability < AMPERE or head_size > 256:
        return False
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return not is_small or head_size <= 192 or (head_size > 224 and not dropout)


def keeps_scores(compute: str, *, capability: tuple[int, int]) -> bool:
    """Whether a GPU supports an element type only in PyTorch's plain attention kernel, which keeps sequence x sequence
    scores per head.
    """
    return compute == "float64" or (compute == "bfloat16" and capability < AMPERE)


OVERLAPPED_ELEMENTS = 1 << 22
"""Minimum number of elements in a piece that gets a collective of its own: 8 MiB in bfloat16. A smaller message ends
before the product that it overlaps with."""


def num_pieces(sequences: int, elements: int) -> int:
    """Number of pieces into which a product is split under sequence parallelism, so that one piece is sent while
    another is multiplied.

    The `sequences` of the micro-batch are split into two halves if each half has enough of the `elements` that are
    sent; otherwise the product is not split. The split is between sequences rather than within them. Half of each
    rank's tokens would be a separate stretch of the sequence for each rank after the gather. The weight gradient would
    then need a copy of its input, or one accumulation per stretch.
    """
    return 2 if sequences % 2 == 0 and elements >= 2 * OVERLAPPED_ELEMENTS else 1
