"""Description of a model in plain Python: the parameters and the computation steps of every sublayer.

Each of the `sublayers` (attention, MLP, gated MLP, norm, embedding, head) lists its steps and the tensors that the
steps read and compute (`steps`). A `Decoder` is a list of layers between an embedding and a head,
and a layer is a tuple of `parts`. `lower` turns a layer
into the steps that one rank runs on a `Target` (tensor ranks, micro-batch, device, data types). Parameters, matrix
products, messages and the activations saved for the backward pass are all derived from these steps.

The planner sums these quantities over the layers. `crosscut.model` builds its modules from the same parameters. The
dry run compares the quantities with the running program. This package imports neither torch nor numpy.
"""

from crosscut.architecture.decoder import Decoder, describe
from crosscut.architecture.lowering import flat, lower, lower_root, run_again
from crosscut.architecture.parameters import Cut, LocalParameter, Matrix, Parameter, Role
from crosscut.architecture.parts import Layer, Part, Sublayer
from crosscut.architecture.readings import Kept, kept, layer_parameters, root_parameters
from crosscut.architecture.steps import Message, Operation, Overlap, Passes, Product, Step, Value
from crosscut.architecture.sublayers.gated_mlp import GatedMLP
from crosscut.architecture.sublayers.heads.abilities import Ability
from crosscut.architecture.sublayers.mlp import MLP
from crosscut.architecture.target import Device, Target

__all__ = [
    "MLP",
    "Ability",
    "Cut",
    "Decoder",
    "Device",
    "GatedMLP",
    "Kept",
    "Layer",
    "LocalParameter",
    "Matrix",
    "Message",
    "Operation",
    "Overlap",
    "Parameter",
    "Part",
    "Passes",
    "Product",
    "Role",
    "Step",
    "Sublayer",
    "Target",
    "Value",
    "describe",
    "flat",
    "kept",
    "layer_parameters",
    "lower",
    "lower_root",
    "root_parameters",
    "run_again",
]
