"""What rooms that never see each other agree on."""

IGNORED = -100
"""A target that adds nothing to the loss: written by `data`, passed over by `parallel`."""

CONFIG_FILE = "config.toml"
"""The resolved run, in a run's folder."""

CHECKPOINTS_FOLDER = "checkpoints"
"""The checkpoints, in a run's folder."""

VOCABULARY_MULTIPLE = 128
"""Entries per rank are a multiple of this, so that the logit product has an efficient shape (paper, section 5.1)."""

LOGITS_AT_ONCE = 1 << 25
"""Logits that the loss keeps on one rank at a time, 128 MiB in float32: as many tokens as fit make a chunk."""


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The vocabulary as it is cut: the next multiple of 128 x tensor ranks. Padded entries take no probability."""
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def default_loss_chunk(local_vocab_size: int) -> int:
    """Tokens whose logits the loss computes together, with `local_vocab_size` vocabulary entries on a rank."""
    return max(1, LOGITS_AT_ONCE // local_vocab_size)


OVERLAPPED_ELEMENTS = 1 << 22
"""Elements of a piece that is worth a collective of its own, 8 MiB in bfloat16: smaller ones are over before a product
beside them is."""


def num_pieces(sequences: int, elements: int) -> int:
    """In how many pieces a product under sequence parallelism runs, so that one is sent while another is multiplied.

    Two halves of the micro-batch's `sequences`, where each has enough of the `elements` that are sent; else one.
    """
    return 2 if sequences % 2 == 0 and elements >= 2 * OVERLAPPED_ELEMENTS else 1
