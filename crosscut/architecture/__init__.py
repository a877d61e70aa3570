"""The parts of a model, each described once in plain Python: its parameters, its steps, and what follows from them.

A sublayer (`attention`, `mlp`, `gated_mlp`, `norm`, `embedding`, `head`) lists its steps over named values (`steps`). A
`Decoder` is a list of layers between an embedding and a head. `lower` turns a layer into the work of one rank on a
`Target`, and all other quantities are computed from the result: parameters, products, messages, kept values. `model`
builds its modules from the same parameters. The planner adds the quantities over the layers. The proof and the dry run
compare them with the running program. This package imports neither torch nor numpy.
"""

from crosscut.architecture.decoder import Decoder, Layer, Sublayer, describe
from crosscut.architecture.gated_mlp import GatedMLP
from crosscut.architecture.lowering import flat, lower, lower_root, run_again
from crosscut.architecture.mlp import MLP
from crosscut.architecture.parameters import Cut, LocalParameter, Matrix, Parameter, Role
from crosscut.architecture.readings import Kept, kept, layer_parameters, root_parameters
from crosscut.architecture.steps import Message, Operation, Overlap, Passes, Product, Step, Value
from crosscut.architecture.target import Device, Target

__all__ = [
    "MLP",
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
