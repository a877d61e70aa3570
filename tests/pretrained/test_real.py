"""Real models: what they were known to say, they say here at every tensor size that their heads allow."""

import json
import struct
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from crosscut.config import Layout
from crosscut.pretrained import find_model
from tests.pretrained import jobs
from tests.pretrained.models import their_logits

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw"
"""Greedy text of stories260K for an empty prompt, from the tests of llama2.c."""


@pytest.fixture(scope="module")
def stories(shared, tmp_path_factory) -> Path:
    """stories260K (llama2.c's smallest model, a Llama with 4 key-value heads for 8) as a Hugging Face folder."""
    source = shared / "data" / "stories260K"
    folder = tmp_path_factory.mktemp("stories260K")
    with (source / "stories260K.bin").open("rb") as file:
        convert_llama2_c(file, folder)
    with (source / "tok512.bin").open("rb") as file:
        write_tokenizer(read_pieces(file, 512), folder)
    return folder


def convert_llama2_c(file: BinaryIO, folder: Path) -> None:
    """A `.bin` file of llama2.c (version 0): seven sizes, then the weights of all layers kind by kind."""
    H, F, L, A, K, vocab_size, positions = struct.unpack("7i", file.read(28))
    D, V = H // A, abs(vocab_size)

    def take(*shape: int) -> Tensor:
        return torch.frombuffer(bytearray(file.read(4 * torch.Size(shape).numel())), dtype=torch.float32).view(shape)

    def halved(weight: Tensor, heads: int) -> Tensor:
        """Rotated pairs are neighbours there and half a head apart here."""
        return weight.view(heads, D // 2, 2, H).transpose(1, 2).reshape(heads * D, H)

    tensors = {"model.embed_tokens.weight": take(V, H)}
    layers = {
        "input_layernorm": take(L, H),
        "self_attn.q_proj": take(L, A * D, H),
        "self_attn.k_proj": take(L, K * D, H),
        "self_attn.v_proj": take(L, K * D, H),
        "self_attn.o_proj": take(L, H, A * D),
        "post_attention_layernorm": take(L, H),
        "mlp.gate_proj": take(L, F, H),
        "mlp.down_proj": take(L, H, F),
        "mlp.up_proj": take(L, F, H),
    }
    for name, heads in (("self_attn.q_proj", A), ("self_attn.k_proj", K)):
        layers[name] = torch.stack([halved(weight, heads) for weight in layers[name]])
    for name, weights in layers.items():
        tensors |= {f"model.layers.{i}.{name}.weight": weight.clone() for i, weight in enumerate(weights)}
    tensors["model.norm.weight"] = take(H)
    assert vocab_size > 0, "a positive size says that the output is tied"
    save_file(tensors, folder / "model.safetensors")
    table = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": H, "intermediate_size": F,
        "num_hidden_layers": L, "num_attention_heads": A, "num_key_value_heads": K, "vocab_size": V,
        "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(table))


def read_pieces(file: BinaryIO, count: int) -> list[str]:
    """The pieces of a llama2.c tokenizer: a score, a length and the bytes of each."""
    file.read(4)
    return [file.read(struct.unpack("fi", file.read(8))[1]).decode() for _ in range(count)]


def write_tokenizer(pieces: list[str], folder: Path) -> None:
    """Enough of a tokenizer to find and to read: whole pieces, no merges."""
    from tokenizers import Tokenizer, models

    names = ["<unk>", "<s>", "</s>", *pieces[3:]]
    Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "pieces.json").write_text(json.dumps(pieces))


def test_stories260k_tells_its_story(ranks, stories):
    source = find_model(stories)
    pieces = json.loads((stories / "pieces.json").read_text())
    for tensor in (1, 2):
        told = ranks.run(tensor, jobs.greedy, source, Layout(tensor=tensor), [1], 50)
        for ids in told:
            assert "".join(pieces[i] for i in ids).strip().startswith(STORY)


def test_stories260k_computes_what_transformers_does(ranks, stories):
    tokens = torch.arange(2 * 64).view(2, 64) * 37 % 512
    theirs = their_logits(stories, torch.float32, tokens)
    for (ours,) in ranks.run(4, jobs.logits, find_model(stories), Layout(tensor=4), ["float32"], tokens):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tensor", [1, 3])
def test_smollm2_says_what_it_said(ranks, shared, smollm2, tensor):
    """Nine heads and three key-value heads: loss, likeliest tokens and continuation as `transformers` gave them."""
    source = find_model(smollm2)
    golden = json.loads((shared / "data" / "smollm2" / "golden.json").read_text())
    prompts = [entry["ids"] for entry in golden.values()]
    told = ranks.run(tensor, jobs.golden, source, Layout(tensor=tensor), prompts, 24, time_limit=600)
    for results in told:
        for entry, found in zip(golden.values(), results, strict=True):
            assert found["loss"] == pytest.approx(entry["loss"], rel=1e-4)
            scale = entry["last_top5"][0][1]
            for (token, score), (id_, value) in zip(entry["last_top5"], found["top5"], strict=True):
                assert token == id_
                assert abs(score - value) <= 1e-4 * scale
            assert found["greedy"] == entry["greedy"]
    assert (source.end_of_text, source.stops, source.begin_of_text) == (2, (), None)
