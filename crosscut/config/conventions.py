"""Conventions shared by packages that do not import each other."""

from math import ceil, gcd, lcm
from pathlib import Path
from types import MappingProxyType

IGNORED = -100
"""Target id that excludes a token from the loss. The package `data` writes this id, and the package `parallel` skips
it."""

CONFIG_FILE = "config.toml"
"""File with the resolved config, in the run's folder."""

MANIFEST_FILE = "manifest.json"
"""File of a checkpoint that describes it and the run that wrote it."""

CHECKPOINTS_FOLDER = "checkpoints"
"""Folder of the checkpoints, in the run's folder."""

TOKENS_FOLDER = "tokens"
"""Folder of the token shards, in the run's folder."""

CHAT_FOLDER = "chat"
"""Folder with the packed conversations, inside the folder of a `crosscut finetune chat` run."""

INITIAL_FOLDER = "initial"
"""Name of a folder inside the run's folder. If the run starts from a published model, this folder holds the model's
files except the weights."""

LOOK = Path(__file__).parent / "look.css"
"""Style sheet of all HTML pages."""

VOCABULARY_MULTIPLE = 128
"""Each rank's share of the vocabulary is a multiple of this number, so that the logit product has an efficient shape
(paper, section 5.1)."""

LOGITS_AT_ONCE = MappingProxyType({"cpu": 1 << 24, "cuda": 1 << 29})
"""Maximum number of logits that the loss holds on one rank at a time, by kind of device. This maximum determines the
number of tokens in a chunk. On the CPU, the logits of a chunk take at most 64 MiB in float32. On a GPU, a chunk has
thousands of tokens, because adding a chunk's gradient to the gradient of the whole embedding costs as much as the
matrix products of a few hundred tokens. A compiled loss on a GPU holds twice as many logits, because its gradients
overwrite them."""


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Vocabulary size after padding: the smallest multiple of 128 x `tensor` and of `multiple` that is at least
    `vocab_size`, where `tensor` is the number of tensor ranks. The added entries get no probability.
    """
    multiple = lcm(multiple, VOCABULARY_MULTIPLE * tensor)
    return -(-vocab_size // multiple) * multiple


def default_loss_chunk(local_vocab_size: int, num_tokens: int, *, device: str = "cpu", compiled: bool = False) -> int:
    """Number of tokens whose logits the loss computes together.

    The `num_tokens` are split into equal chunks, each a multiple of 128 tokens where possible. `local_vocab_size` is
    the number of vocabulary entries on one rank. A device of "auto" is treated as the CPU. `compiled` says whether the
    loss is compiled.
    """
    logits = LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["cpu"]) * (2 if compiled and device == "cuda" else 1)
    most = max(1, logits // local_vocab_size)
    most -= most % 128 if most > 128 else 0
    even = -(-num_tokens // -(-num_tokens // most)) if num_tokens else 1
    return min(most, -(-even // 128) * 128)


MASKED_FRACTION = 0.15
"""Fraction of the tokens that a BERT predicts."""


def predicted_rows(num_masked: int | None, num_tokens: int, fraction: float) -> int:
    """Number of tokens for which the head of a masked language model computes logits. The micro-batch has `num_tokens`
    tokens, and `num_masked` of them are masked. If `num_masked` is None, the expected number is used instead:
    `fraction` x `num_tokens`.

    The result is at least the expected number and at most `num_tokens`. It is rounded up to a multiple of an eighth of
    the expected number, so that kernels and compiled code run with only a few different shapes.
    """
    eighth = ceil(num_tokens * fraction / 8)
    return min(max(8, ceil((num_masked or 0) / eighth)) * eighth, num_tokens)


LABELS_FILE = "labels.json"
"""File in the folder of a run with `model.head = "classes"`: the names of the classes, as a JSON list."""

SPECIAL_FILE = "special.json"
"""File in the folder of a decoder that was fine-tuned for a task: the token ids around its texts, `begin` and `end`."""

BUCKET_BYTES = 32 << 20
"""Size of a gradient bucket in bytes. A full bucket is sent to the other data ranks."""

PIECE_ELEMENTS = 1 << 24
"""If the AdamW moments are in host memory, the optimizer moves them to the device in pieces. This is the number of
elements of each moment in a piece. In float32, these elements take 64 MiB, which a bus of 25 GB/s moves in 3 ms."""

AMPERE = (8, 0)
"""Compute capability of NVIDIA's Ampere, the first architecture with matrix products in bfloat16, and the first that
FlashAttention supports."""


def takes_shared_heads(
    compute: str, *, head_size: int, dropout: float, capability: tuple[int, int], masked: bool = False
) -> bool:
    """Whether a GPU's attention kernel accepts fewer key and value heads than query heads.

    Only FlashAttention accepts fewer heads. FlashAttention needs a 2-byte element type (`compute`, torch's name of the
    type), compute capability 8.0 (Ampere) or newer, and a head size of at most 256, and accepts no mask (`masked`).
    GPUs with less shared memory (8.6 to 8.9 and 12.x) support head sizes above 192 only in part. In all other cases
    except float64, PyTorch uses its memory-efficient kernel, which requires equal numbers of heads (up to PyTorch 2.13:
    `can_use_mem_efficient_attention`). For this kernel, the keys and values are repeated. Otherwise, PyTorch would use
    a kernel that keeps all scores in memory.
    """
    if masked or compute not in ("bfloat16", "float16") or capability < AMPERE or head_size > 256:
        return False
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return not is_small or head_size <= 192 or (head_size > 224 and not dropout)


def keeps_scores(compute: str, *, capability: tuple[int, int]) -> bool:
    """Whether a GPU supports an element type only in PyTorch's plain attention kernel. For each head, the plain kernel
    keeps a score for every pair of tokens in memory.
    """
    return compute == "float64" or (compute == "bfloat16" and capability < AMPERE)


OVERLAPPED_ELEMENTS = 1 << 22
"""Minimum number of elements of a piece that is sent in a separate collective: 8 MiB in bfloat16. Smaller pieces would
save no time, because even a message of this size ends before the matrix product with which it overlaps."""


def num_pieces(sequences: int, elements: int) -> int:
    """Number of pieces into which a product is split under sequence parallelism, so that one piece is sent while
    another piece is multiplied.

    The product is split in two if the number of `sequences` in the micro-batch is even and each half of the `elements`
    to send is large enough. If not, the product stays whole.

    Each piece consists of whole sequences. If each piece were half of every sequence, the gathered tokens of a piece
    would be separate sections of the sequence, one section per rank. The weight gradient would then need a copy of its
    input, or one accumulation per section.
    """
    return 2 if sequences % 2 == 0 and elements >= 2 * OVERLAPPED_ELEMENTS else 1


def repeats_of_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Return how many copies all-to-all attention makes of each key-value head, so that the total number of copies is a
    multiple of `num_ranks`, the number of context ranks. `num_heads` and `num_kv_heads` are the numbers of query heads
    and of key-value heads on one tensor rank. `num_ranks` must divide `num_heads`.
    """
    needed = num_ranks // gcd(num_ranks, num_kv_heads)
    shared = num_heads // num_kv_heads  # the copies must divide this number, so that each copy serves whole heads
    return next(times for times in range(needed, shared + 1) if not shared % times and not times % needed)
