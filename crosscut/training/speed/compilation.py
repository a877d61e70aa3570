"""Compilation of each layer's forward and backward pass into one graph, including its collectives.

All layers share one graph, because their weights are inputs of the graph. Validation needs no backward pass and uses a
second graph. The layer's `Runner` calls the compiled code inside the module's call. Names and hooks of modules are
therefore unchanged, and recomputation (which wraps the runner's call) and sharding (which hooks on the module) stay
outside the graph. If compiled code was requested and did not run, an error is raised.

The compiler decides which activations a compiled layer keeps for its backward pass: it keeps every tensor that a matrix
product of the backward pass reads. Marks in the graph change this choice. Layers mark their residual sums to be kept,
and layers that recompute cheap operators mark these operators.
"""

import importlib.util
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.utils.checkpoint import CheckpointPolicy

from crosscut.config import ConfigError, ResolvedRun, TrainingError
from crosscut.config.conventions import keeps_scores
from crosscut.config.layout import ContextAttention
from crosscut.config.layouts.compilation import not_compilable
from crosscut.config.system.terminal import new_console
from crosscut.config.training import Compile
from crosscut.kernels import LossPasses
from crosscut.model import GPT
from crosscut.model.block import Block
from crosscut.model.running import LossRunner
from crosscut.parallel import ParallelMesh
from crosscut.parallel.state.leaves import on_leaves

BACKEND = "inductor"
"""Backend of `torch.compile` that compiles the graphs."""

_IN_ORDER = {"reorder_for_peak_memory": False}
"""Inductor settings for layers that communicate. By default, Inductor reorders operators to save memory; it then waits
for a collective right after starting it, so nothing overlaps with the collective.
"""

_ALIKE = {"deterministic": True}
"""Further Inductor settings for tensor ranks that compute the same values. By default, Inductor times its reduction
kernels on each GPU and uses the fastest kernel. Two ranks may then sum the row of a norm in different orders and get
different bits.
"""

_CHEAP = "crosscut_cheap"
"""Key of the mark on operators that are recomputed under `training.recompute = "operators"`."""

_KEPT = "crosscut_kept"
"""Key of the mark on operators that are never recomputed, so that the backward pass keeps their results."""

_RING_IS_RIGHT = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
"""Whether this PyTorch compiles ring attention to code with the right results. PyTorch 2.11 does not."""


_T = TypeVar("_T")

Graph = Callable[..., object]
"""Compiled graph."""
MakeGraph = Callable[[torch.fx.GraphModule, list[Tensor]], Graph]
"""Function that compiles a graph that PyTorch has traced, for inputs like these."""


def make_compiler(run: ResolvedRun, mesh: ParallelMesh) -> "Compiler | None":
    """Make the compiler of the layers, if the run asks for compiled code.

    Returns None if layers are not compiled. If `training.compile` is `auto` and layers cannot be compiled on a GPU, the
    first rank prints the reason. Raises the `ConfigError` of `require_compilation`.
    """
    require_compilation(run, mesh.device)
    if not _is_wanted(run, mesh.device):
        return None
    if reason := _reason_against(run, mesh.device):
        if mesh.is_first_rank:
            new_console(stderr=True).print(f"Layers are not compiled: {reason}.", markup=False, highlight=False)
        return None
    return Compiler(BACKEND, _inductor_settings(run))


def compiled_loss() -> LossRunner:
    """Return a runner of the loss that uses compiled code (`kernels.loss_passes`)."""
    compiler = Compiler(BACKEND)
    return LossRunner(compiled=LossPasses(compiler.compiled), compiler=compiler)


def _inductor_settings(run: ResolvedRun) -> dict[str, bool]:
    if run.layout.ranks.cuts.size == 1:
        return {}
    return _IN_ORDER if run.layout.splits_sequence else {**_IN_ORDER, **_ALIKE}


def require_compilation(run: ResolvedRun, device: torch.device) -> None:
    """Raise `ConfigError` if `training.compile` is `on` but layers cannot be compiled on this machine."""
    if run.training.compile == Compile.ON and (reason := _reason_against(run, device)):
        raise ConfigError(not_compilable(reason))


def _is_wanted(run: ResolvedRun, device: torch.device) -> bool:
    return run.training.compile == Compile.ON or (run.training.compile == Compile.AUTO and device.type == "cuda")


def _reason_against(run: ResolvedRun, device: torch.device) -> str:
    """Reason why layers cannot be compiled, as a clause to follow a colon. Empty if layers can be compiled."""
    if reason := run.config.reason_against_compiling:
        return reason
    if run.layout.context > 1 and run.config.context_attention.way is ContextAttention.RING and not _RING_IS_RIGHT:
        return f"PyTorch {torch.__version__} compiles ring attention to wrong results (2.13 does not)"
    repeats_scores = run.config.repeats_scores
    if device.type == "cpu" and repeats_scores and run.model.dropout:
        return 'attention with dropout keeps its scores on the CPU, but training.recompute="selective" keeps none'
    if device.type == "cuda" and repeats_scores:
        compute = run.training.numbers.compute
        if keeps_scores(compute, capability=torch.cuda.get_device_capability(device)):
            return f'attention in {compute} keeps its scores on this GPU, but training.recompute="selective" keeps none'
    return reason_against_compiler(device)


def reason_against_compiler(device: torch.device) -> str:
    """Reason why this machine can compile no layers, as a clause to follow a colon. Empty if it can."""
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # not read by PyTorch yet
        return "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE in the environment turns compilation off"
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "Triton, which generates the GPU kernels, is not installed"
    return "" if _has_cpp_compiler() else "no C++ compiler was found for the CPU kernels (g++, or the value of CXX)"


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


class Compiler:
    """Compiler of a model's layers or of its loss. It counts the graphs and their runs.

    `inductor_settings` override the defaults of Inductor; other backends ignore them.
    """

    def __init__(self, backend: str, inductor_settings: Mapping[str, bool] = MappingProxyType({})) -> None:
        self.num_graphs = 0
        """Number of graphs compiled so far: one for all layers in training, one more for validation."""
        self.num_runs = 0
        """Number of graph runs so far."""
        self.is_paused = False
        compile_graph: MakeGraph = torch._dynamo.lookup_backend(backend)
        told = {"config_patches": dict(inductor_settings)} if inductor_settings and backend == "inductor" else {}
        self._compile: MakeGraph = partial(compile_graph, **told)
        self._copies: dict[object, types.FunctionType] = {}

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function as compiled code. Calls to the result raise `TrainingError`, as `run` does."""
        return partial(self.run, "The loss", self.trace(function, self.make_graph))

    def trace(self, function: Callable[..., _T], make_graph: MakeGraph) -> Callable[..., _T]:
        """Return a compiled version of `function`. At the first call, and for each new input shape, PyTorch traces the
        function and `make_graph` compiles the traced graph.
        """
        return torch.compile(self._own_copy(function), fullgraph=True, dynamic=False, backend=make_graph)

    def run(self, what: str, compiled: Callable[..., _T], *arguments: object) -> _T:
        """Return `compiled(*arguments)`. Raises `TrainingError` if PyTorch runs uncompiled code instead; `what` names
        the code in the message.
        """
        before = self.num_runs
        try:
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # numbers of rows of experts
                result = compiled(*arguments)
        except FailOnRecompileLimitHit as error:
            raise _not_compiled(what, "PyTorch met too many different shapes or settings") from error
        except Unsupported as error:
            first_line = str(error).strip().partition("\n")[0]
            raise _not_compiled(what, f"PyTorch cannot trace it ({first_line})") from error
        except RuntimeError as error:
            if "no compiled frames" in str(error):
                raise _not_compiled(what, _RUN_UNCOMPILED) from error
            raise
        if self.num_runs == before:  # PyTorch before 2.13 raises no error in this case
            raise _not_compiled(what, _RUN_UNCOMPILED)
        return result

    def _own_copy(self, function: Callable[..., object]) -> types.FunctionType:
        """Copy the function with a new code object for this model. PyTorch limits the number of graphs per code object.
        Without the copy, all models in a process would share this limit.
        """
        if function not in self._copies:
            self._copies[function] = types.FunctionType(
                function.__code__.replace(),
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
        return self._copies[function]

    def make_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
        """Compile a graph that PyTorch has traced, and count its runs. The graph does not recompute operators that are
        marked as kept.
        """
        return self._make_graph(graph, inputs, {_KEPT: CheckpointPolicy.MUST_SAVE})

    def _make_graph(
        self, graph: torch.fx.GraphModule, inputs: list[Tensor], policies: Mapping[str, CheckpointPolicy]
    ) -> Graph:
        """Do what `make_graph` does, with a policy for the operators of each mark."""
        self.num_graphs += 1
        for node in graph.graph.nodes:
            for mark in policies.keys() & node.meta.get("custom", ()):  # what `torch.utils.checkpoint` sets
                node.meta.update(recompute=policies[mark], ac_graph_id=0)
        config: Any = torch.compiler.config
        with config.patch(cache_key_tag=" ".join([config.cache_key_tag, *policies])):  # keys do not include the marks
            compiled = self._compile(graph, inputs)

        def run(*arguments: object) -> object:
            self.num_runs += 1
            return compiled(*arguments)

        return run

    def make_recomputing_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Graph:
        """Compile a traced graph whose backward pass recomputes the cheap operators, so that their outputs are not
        kept.
        """
        policies = {_KEPT: CheckpointPolicy.MUST_SAVE, _CHEAP: CheckpointPolicy.MUST_RECOMPUTE}
        return self._make_graph(graph, inputs, policies)


def marked_cheap(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """Call the function, and mark its operators in the traced graph as cheap to compute again."""
    with torch.fx.traceback.annotate({_CHEAP: True}):
        return function(*inputs)


def marked_kept(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """Call the function, and mark its operators in the traced graph as never to be computed again."""
    with torch.fx.traceback.annotate({_KEPT: True}):
        return function(*inputs)


@final
class CompiledCode:
    """Callable that runs a layer's method as compiled code. All layers share the compiled code. Raises `TrainingError`
    if PyTorch runs uncompiled code.

    With `recomputes_operators`, layers do not keep the outputs of cheap operators.
    """

    def __init__(self, compiler: Compiler, *, recomputes_operators: bool = False) -> None:
        self._compiler = compiler
        self._make_graph = compiler.make_recomputing_graph if recomputes_operators else compiler.make_graph
        self._traced: dict[object, Callable[..., Any]] = {}
        self._modules: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
        """Modules with parameters inside each layer, apart from the layer itself."""

    def __call__(self, function: Callable[..., _T], *inputs: object) -> _T:
        """Return `function(*inputs)`, where `function` is a bound method of a layer."""
        if self._compiler.is_paused:
            return function(*inputs)
        assert isinstance(function, types.MethodType)
        if (method := function.__func__) not in self._traced:
            self._traced[method] = self._compiler.trace(method, self._make_graph)
        layer = function.__self__
        assert isinstance(layer, nn.Module)
        if layer not in self._modules:
            self._modules[layer] = [each for each in layer.modules() if each._parameters and each is not layer]
        call = partial(self._compiler.run, "A layer", self._traced[method], layer)
        result: _T = on_leaves((layer, *self._modules[layer]), call, *inputs)
        return result


_RUN_UNCOMPILED = "PyTorch ran it uncompiled"


def _not_compiled(what: str, reason: str) -> TrainingError:
    return TrainingError(
        f"{what} must run as compiled code (`training.compile`), but does not: {reason}. Set "
        'training.compile="off", or run with TORCH_LOGS=graph_breaks,recompiles to see the cause.'
    )


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the compiled modules. Modules inside a compiled module are part of its graph, so they are not
    called separately.
    """
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, Block) and module.runner.compiler is not None
    )


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run layers and loss uncompiled inside the context. Use this context to inspect layers, or for input shapes that
    occur only once. Do not train inside the context.
    """
    runners = [module.runner for module in model.modules() if isinstance(module, Block)]
    compilers = {runner.compiler for runner in runners if runner.compiler is not None}
    if isinstance(model, GPT) and model.loss_runner.compiler is not None:
        compilers.add(model.loss_runner.compiler)
    for compiler in compilers:
        compiler.is_paused = True
    try:
        yield
    finally:
        for compiler in compilers:
            compiler.is_paused = False
