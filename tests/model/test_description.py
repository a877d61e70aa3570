"""The modules of a model against the description that they are built from."""

import torch
from torch import nn

from crosscut.architecture import Target, describe
from crosscut.config import Layout, ModelConfig
from crosscut.model import GPT
from crosscut.parallel import ParallelMesh, RandomStreams, make_mesh
from crosscut.parallel.state.parameters import cut_dim, local_part
from tests.ranks import RankPool

SMALL = {"num_layers": 3, "hidden_size": 32, "num_heads": 8, "vocab_size": 300, "max_sequence_length": 16}
MODELS = (
    ModelConfig(**SMALL, num_kv_heads=2, qk_norm=True, tied=False, layers=("attention swiglu", "attention gelu")),
    ModelConfig(
        **SMALL, attention="bidirectional", norm_place="after", token_types=2, layers=("attention gelu_exact",)
    ),
    ModelConfig(**SMALL, attention="bidirectional", head="masked_tokens", sentence_order=True, tied=False),
    ModelConfig(**SMALL, positions="rotary", norm="rms", layers=("attention swiglu",), biases="qkv"),
    ModelConfig(**SMALL, num_kv_heads=2, lora_rank=3),
    ModelConfig(**SMALL, attention="bidirectional", head="classes", num_classes=3),
    ModelConfig(**SMALL, head="choice"),
    ModelConfig(**SMALL, head="spans"),
)


def found_and_described_of_all(tensor: int) -> list[tuple[list[object], list[object]]]:
    mesh = make_mesh(Layout(tensor=tensor), torch.device("cpu"))
    return [found_and_described(config, mesh) for config in MODELS]


def found_and_described(config: ModelConfig, mesh: ParallelMesh) -> tuple[list[object], list[object]]:
    tensor, target = mesh.tensor.size, Target.of(mesh.layout)
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0))
    found: list[object] = [
        (name, tuple(parameter.shape), cut_dim(parameter), tuple(local_part(parameter).shape))
        for name, parameter in model.named_parameters()
    ]
    described: list[object] = [
        (parameter.name, parameter.padded_shape(tensor), parameter.dim_cut(tensor), parameter.on(target).shape)
        for parameter in describe(config).parameters()
    ]
    assert isinstance(model, nn.Module)
    return found, described


def test_parameters_have_the_names_shapes_and_cuts_of_the_description(ranks: RankPool) -> None:
    for tensor in (1, 2, 4):
        for of_models in ranks.run(tensor, found_and_described_of_all, tensor):
            assert len(of_models) == len(MODELS)
            for found, described in of_models:
                assert sorted(found, key=str) == sorted(described, key=str)
