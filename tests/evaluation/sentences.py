"""Tiny sentence encoders that sentence-transformers writes, and their embeddings by sentence-transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.pretrained.encoders import make_encoder

TEXTS = [
    "the quick brown fox", "dog", "  the lazy DOG jumps over the Quick fox ", "", "jumps [MASK] lazy", "fox " * 30,
]  # fmt: skip
HIDDEN = 32
SPECIAL = {name: f"[{name.removesuffix('_token').upper()}]" for name in
           ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")}  # fmt: skip


def make_trunk(folder: Path, **settings: Any) -> Path:
    """Write a BERT for at most 16 tokens, with a WordPiece whose `tokenizer_config.json` has these settings."""
    make_encoder(folder, "bert", wordpiece=True)
    usual = {"tokenizer_class": "BertTokenizer", **SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | settings))
    return folder


def modules_of(trunk: Path, modes: str | Sequence[str], tail: str, **pooling: Any) -> list[Any]:
    """A Transformer, a Pooling, and the modules in `tail`: N(ormalize), D(ense), R (dense with a residual), S (square
    with a residual and no bias).
    """
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    found = [Transformer(str(trunk)), Pooling(HIDDEN, modes, **pooling)]
    size = found[1].get_embedding_dimension()
    torch.manual_seed(5)
    for kind in tail:
        if kind == "N":
            found.append(Normalize())
            continue
        outputs = size if kind == "S" else 24
        function = {"D": torch.nn.Tanh(), "R": None, "S": torch.nn.GELU()}[kind]
        found.append(Dense(size, outputs, bias=kind != "S", activation_function=function, use_residual=kind != "D"))
        size = outputs
    return found


def write(folder: Path, modules: list[Any], **settings: Any) -> Path:
    """Write a sentence encoder as the library does."""
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(modules=modules, device="cpu", **settings).save_pretrained(str(folder), create_model_card=False)
    return folder


def library(folder: Path) -> Any:
    """The library's model of a folder, in float64."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True).double()


def theirs(folder: Path, texts: Sequence[str] = TEXTS, **asked: Any) -> Tensor:
    """The library's embeddings. Each text is alone in its batch, because padding on the left moves the positions of a
    text.
    """
    model = library(folder)
    return torch.stack([model.encode(text, convert_to_tensor=True, show_progress_bar=False, **asked) for text in texts])


def change(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    """Change a JSON file. A file that does not exist is empty."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(edit(json.loads(path.read_text()) if path.is_file() else {})))


def with_keys(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda table: {**table, **values}
