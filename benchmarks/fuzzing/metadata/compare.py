"""Comparison of Crosscut with the reference libraries on one folder."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzzing.metadata.folders import ADAPTER_FOLDER, HEADS, REMOVED, Edit
from crosscut.config import CrosscutError
from crosscut.config.published.folders import (
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
)
from crosscut.config.published.generation import check_generation
from crosscut.config.published.keys.generation import GENERATION, SAMPLING_WITHOUT_OPTION
from crosscut.config.published.sentences import is_sentence_encoder
from crosscut.data.tokenization.published import PublishedTokenizer
from crosscut.evaluation.embeddings.texts import require_embeddings
from crosscut.evaluation.embeddings.vectors import embeddings
from crosscut.kernels.soft_cap import soft_cap
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh
from crosscut.parallel.state.parameters import local
from crosscut.pretrained import ModelSource, find_model

TOLERANCE = 1e-5
"""Largest difference, relative to the largest value. The norms of `transformers` compute in float32."""
TEXTS = ("The Quick fox", " jumps over<|endoftext|>", "Caf\u00e9 2024 [MASK] </s><s>")
TOKENS = torch.arange(12)[None] * 37 % 290 + 2


@dataclass(frozen=True)
class Verdict:
    """Result of one case: `refused`, `the same`, `told`, `no reference`, or `different`."""

    result: str
    detail: str = ""


def compare(folder: Path, edit: Edit, mesh: ParallelMesh) -> Verdict:
    """Compare what Crosscut computes from a folder with what the reference computes, after `edit`. Exceptions other
    than Crosscut's own reach the caller.
    """
    told = io.StringIO()
    file = edit.file
    is_tokenizer = file in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)
    is_adapted = file.startswith(ADAPTER_FOLDER)
    try:
        with contextlib.redirect_stderr(told):
            source = find_model(folder, adapter=folder / ADAPTER_FOLDER if is_adapted else "")
            notices = []
            if source.model.head == "next_token" and source.model.is_causal:
                notices = check_generation(source.settings_folders, None, "")
            if is_sentence_encoder(folder):
                ours: Any = _our_embeddings(source, mesh, notices)
            elif is_tokenizer:
                inner = PublishedTokenizer(path=source.tokenizer).read()
                ours = [inner.encode(text).ids for text in TEXTS]
            else:
                ours = _ours(source, mesh)
    except CrosscutError as error:
        return Verdict("refused", str(error))
    said = told.getvalue() + "".join(notices)
    try:
        with silent():
            if is_sentence_encoder(folder):
                theirs: Any = _their_embeddings(folder)
            elif is_tokenizer:
                theirs = _their_ids(folder)
            else:
                theirs = _theirs(folder, source, is_adapted)
    except Exception as error:
        return Verdict("no reference", f"{type(error).__name__}: {error}"[:300])
    if theirs is None:
        return Verdict("no reference", "the head is left out")
    if isinstance(ours, list):
        difference = "" if ours == theirs else f"{ours} and {theirs}"
    else:
        difference = _difference(ours, theirs)
    difference = difference or _differing_generation(folder, source, said)
    if not difference:
        return Verdict("the same")
    is_told = any(str(one) in said for one in (edit.path[-1], *_texts(edit.value)))
    return Verdict("told" if is_told else "different", f"{difference}; {said}")


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value of a JSON file."""
    if isinstance(value, str) and value and value != REMOVED:
        yield value
    for each in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _differing_generation(folder: Path, source: ModelSource, said: str) -> str:
    """Describe the first setting of generation that `transformers` follows, and that Crosscut neither follows nor
    names. Empty if there is none.
    """
    from transformers import GenerationConfig

    if source.model.head != "next_token" or not source.model.is_causal:
        return ""
    name = GENERATION_FILE if (folder / GENERATION_FILE).is_file() else MODEL_FILE
    try:
        with silent():
            theirs = GenerationConfig.from_pretrained(folder, config_file_name=name, _from_model_config=True)
    except Exception:
        return ""
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    if unknown := {*ends} - {None, source.end_of_text, *source.stops}:
        return f"stops {sorted(unknown)} of transformers"
    nothing = {key: (*values, None) for key, values in GENERATION.only.items()}
    nothing |= {key: (value, None) for key, value in SAMPLING_WITHOUT_OPTION.items()}
    nothing |= {"temperature": (1.0, None), "top_k": (0, None), "top_p": (1.0, None), "repetition_penalty": (1.0, None)}
    names = {"stop_strings": "stop", "do_sample": "temperature"}
    for key, values in {**nothing, "stop_strings": (None, [], "")}.items():
        if (value := getattr(theirs, key, None)) not in values and f"{names.get(key, key)} = " not in said:
            return f"{key} = {value} of transformers"
    return ""


def _difference(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shapes {list(ours.shape)} and {list(theirs.shape)}"
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    return "" if apart <= TOLERANCE else f"{apart:.1e} apart"


@torch.no_grad()
def _ours(source: ModelSource, mesh: ParallelMesh) -> Tensor | None:
    model = source.load(mesh, precision="float64")
    tokens = TOKENS[:, : source.model.max_sequence_length]
    if source.model.solves_task:
        return model.task_logits(Batch(tokens=tokens))
    hidden = model.hidden_states(Batch(tokens=tokens))
    if source.model.head == "masked_tokens":
        return model.logits_of(hidden)[..., : source.model.vocab_size]
    if source.model.head != "next_token" or not source.model.is_causal:
        return hidden
    logits = hidden @ local(model.head.projection.weight, hidden.dtype).t()
    return soft_cap(logits[..., : source.model.vocab_size], source.model.logit_softcap)


@torch.no_grad()
def _theirs(folder: Path, source: ModelSource, is_adapted: bool) -> Tensor | None:
    import transformers

    table = json.loads((folder / "config.json").read_text())
    names = table.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else ""
    if source.model.head == "next_token" and not source.model.is_causal:
        kind = transformers.AutoModel
    elif source.model.head != "next_token":
        kind = getattr(transformers, name)
    else:
        kind = transformers.AutoModelForCausalLM
    if name and not hasattr(transformers, name):
        return None
    if source.model.is_causal and not source.model.solves_task and str(name).endswith(HEADS[2:]):
        return None
    # The grouped products of experts, which are the default, have no float64.
    model = kind.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    if is_adapted:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / ADAPTER_FOLDER).eval()
    tokens = TOKENS[:, : source.model.max_sequence_length]
    out = model(tokens)
    if source.model.head == "spans":
        return torch.stack([out.start_logits, out.end_logits], -1)
    found: Tensor = out.last_hidden_state if kind is transformers.AutoModel else out.logits
    return found


def _our_embeddings(source: ModelSource, mesh: ParallelMesh, notices: list[str]) -> Tensor:
    encoder = require_embeddings(source, 1)
    notices += encoder.steps.notices
    inner = encoder.tokenizer.read(encoder.max_tokens)
    ids = [inner.encode(encoder.prompt + text).ids for text in TEXTS]
    return embeddings(source.load(mesh, precision="float64"), ids, pooling=encoder.pooling())


def _their_embeddings(folder: Path) -> Tensor:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True).double()
    return torch.stack([model.encode(text, convert_to_tensor=True, show_progress_bar=False) for text in TEXTS])


def _their_ids(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Hide what the reference libraries print and warn of."""
    logging.disable(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
