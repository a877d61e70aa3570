"""Tensor-parallel layers, the operators at which ranks communicate, and distributed parameters and gradients.

This package also works without the rest of Crosscut: you can build your own model from these layers and train it on any
layout. Importing this package imports torch.
"""

from crosscut.config import IGNORED, RankFailure
from crosscut.parallel.cross_entropy import LossSettings, vocab_parallel_cross_entropy
from crosscut.parallel.distillation import Distillation, Mixture, TopLogits, top_logits
from crosscut.parallel.embedding import (
    PositionEmbedding,
    TiedWeight,
    TokenTypeEmbedding,
    VocabParallelEmbedding,
    VocabParallelOutput,
)
from crosscut.parallel.linear import (
    Blocks,
    ColumnParallelLinear,
    ColumnParallelLinears,
    Multiplication,
    ReplicatedLinear,
    RowParallelLinear,
)
from crosscut.parallel.mesh import Axis, ParallelMesh, make_lone_mesh, make_mesh, make_repeated_mesh
from crosscut.parallel.norm import LayerNorm, NormPlace, RMSNorm
from crosscut.parallel.operators import (
    copy_to_tensor_parallel,
    enter_tensor_parallel,
    gather_from_sequence_parallel,
    gather_from_tensor_parallel,
    join_from_sequence_parallel,
    leave_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
)
from crosscut.parallel.random import Dropout, RandomStreams, disturb_, normal_, seed_of
from crosscut.parallel.recorder import CollectiveRecorder, Sent
from crosscut.parallel.state.agreement import Drift, find_drift
from crosscut.parallel.state.gradient_norm import GradientNorm, clip_gradients_, global_gradient_norm, measure_gradients
from crosscut.parallel.state.gradients import GradientReducer, sum_copies
from crosscut.parallel.state.low_rank import LowRankGradients
from crosscut.parallel.state.parameters import (
    local,
    local_inside,
    local_on_sequence,
    replicated_parameter,
    sharded_parameter,
)
from crosscut.parallel.state.sharding import Reducer, ShardedReducer, make_reducer, reshard, shard_model
from crosscut.parallel.symmetric_memory import enable_symmetric_memory, require_symmetric_memory

__all__ = [
    "IGNORED",
    "Axis",
    "Blocks",
    "CollectiveRecorder",
    "ColumnParallelLinear",
    "ColumnParallelLinears",
    "Distillation",
    "Drift",
    "Dropout",
    "GradientNorm",
    "GradientReducer",
    "LayerNorm",
    "LossSettings",
    "LowRankGradients",
    "Mixture",
    "Multiplication",
    "NormPlace",
    "ParallelMesh",
    "PositionEmbedding",
    "RMSNorm",
    "RandomStreams",
    "RankFailure",
    "Reducer",
    "ReplicatedLinear",
    "RowParallelLinear",
    "Sent",
    "ShardedReducer",
    "TiedWeight",
    "TokenTypeEmbedding",
    "TopLogits",
    "VocabParallelEmbedding",
    "VocabParallelOutput",
    "clip_gradients_",
    "copy_to_tensor_parallel",
    "disturb_",
    "enable_symmetric_memory",
    "enter_tensor_parallel",
    "find_drift",
    "gather_from_sequence_parallel",
    "gather_from_tensor_parallel",
    "global_gradient_norm",
    "join_from_sequence_parallel",
    "leave_tensor_parallel",
    "local",
    "local_inside",
    "local_on_sequence",
    "make_lone_mesh",
    "make_mesh",
    "make_reducer",
    "make_repeated_mesh",
    "measure_gradients",
    "normal_",
    "reduce_from_tensor_parallel",
    "reduce_scatter_to_sequence_parallel",
    "replicated_parameter",
    "require_symmetric_memory",
    "reshard",
    "scatter_to_sequence_parallel",
    "seed_of",
    "shard_model",
    "sharded_parameter",
    "sum_copies",
    "top_logits",
    "vocab_parallel_cross_entropy",
]
