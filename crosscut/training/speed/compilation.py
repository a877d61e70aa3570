"""Each layer's forward and backward pass as one compiled graph, its collectives inside.

All layers share one graph, since their weights are its inputs; validation, which keeps nothing for a backward pass, is
a second one. The layer's `Runner` calls the compiled code inside the call of the module, so names and hooks of modules
stay as they are, and whatever wraps the runner's call (recomputation) or hooks on the module (sharding) stays outside.
Code that was asked for and did not run is an error.

What a layer keeps for its backward pass is then for the compiler to choose, which takes whatever a product of the
backward pass reads as worth keeping. Layers that recompute such operators say so in the graph.
"""

import importlib.util
import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
from rich.console import Console
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.utils.checkpoint import CheckpointPolicy

from crosscut.config import ConfigError, ResolvedRun, TrainingError
from crosscut.config.conventions import keeps_scores
from crosscut.config.run import not_compilable
from crosscut.kernels import LossPasses
from crosscut.model import GPT
from crosscut.model.block import Block
from crosscut.parallel import ParallelMesh

BACKEND = "inductor"
"""Compiler of graphs, by its name in `torch.compile`."""

_IN_ORDER = {"reorder_for_peak_memory": False}
"""Settings of Inductor where layers communicate: its default reorders operators to take less memory, and then waits at
once for a collective that was begun early."""

_ALIKE = {"deterministic": True}
"""Further settings of Inductor where tensor ranks compute the same: its default times the reduction kernels on each GPU
and takes the fastest, and two kernels may add a norm's row in different orders."""

_CHEAP = "crosscut_cheap"
"""Key of the mark on operators that layers compute again under `training.recompute = "operators"`."""


def make_compiler(run: ResolvedRun, mesh: ParallelMesh) -> "Compiler | None":
    """Compiler of the layers, if the run asks for compiled code.

    None if nothing is compiled: the first rank says why if `training.compile` is `auto` on a GPU. Raises `ConfigError`
    as `require_compilation`.
    """
    require_compilation(run, mesh.device)
    if not _is_wanted(run, mesh.device):
        return None
    if reason := _reason_against(run, mesh.device):
        if mesh.is_first_rank:
            Console(stderr=True).print(f"Layers are not compiled: {reason}.", markup=False, highlight=False)
        return None
    return Compiler(BACKEND, _inductor_settings(run))


def compiled_loss_passes() -> LossPasses:
    """The passes of the loss as compiled code."""
    return LossPasses(Compiler(BACKEND).compiled)


def _inductor_settings(run: ResolvedRun) -> dict[str, bool]:
    if run.layout.tensor == 1:
        return {}
    return _IN_ORDER if run.sequence_parallel else {**_IN_ORDER, **_ALIKE}


def require_compilation(run: ResolvedRun, device: torch.device) -> None:
    """Raise `ConfigError` where `training.compile` is `on` and this machine does not allow it."""
    if run.training.compile == "on" and (reason := _reason_against(run, device)):
        raise ConfigError(not_compilable(reason))


def _is_wanted(run: ResolvedRun, device: torch.device) -> bool:
    return run.training.compile == "on" or (run.training.compile == "auto" and device.type == "cuda")


def _reason_against(run: ResolvedRun, device: torch.device) -> str:
    """Why layers cannot be compiled, in words that follow a colon; empty where they can be."""
    if reason := run.config.reason_against_compiling:
        return reason
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":  # the latter when a layer is met
        return "compilation is turned off by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE in the environment"
    if device.type == "cpu" and run.training.recompute == "selective" and run.model.dropout:
        return 'attention with dropout keeps its scores on the CPU, which training.recompute="selective" forbids'
    if device.type == "cuda" and run.training.recompute == "selective":
        compute = run.numbers.compute
        if keeps_scores(compute, capability=torch.cuda.get_device_capability(device)):
            return f'attention in {compute} keeps its scores on this GPU, which training.recompute="selective" forbids'
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "Triton, which writes the GPU's kernels, is not installed"
    return "" if _has_cpp_compiler() else "there is no C++ compiler for the CPU's kernels (g++ or what CXX names)"


def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


class Compiler:
    """Compiles the layers of one model, or its loss, and counts the graphs and how often they ran.

    `inductor_settings` are for PyTorch's own compiler, in the place of its defaults, and for no other.
    """

    def __init__(self, backend: str, inductor_settings: Mapping[str, bool] = MappingProxyType({})) -> None:
        self.num_graphs = 0
        """Graphs that were made: one for all layers in training, one more for validation."""
        self.num_runs = 0
        """Number of times that one of the graphs ran."""
        self.is_paused = False
        compile_graph: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        told = {"config_patches": dict(inductor_settings)} if inductor_settings and backend == "inductor" else {}
        self._compile = partial(compile_graph, **told)
        self._copies: dict[types.FunctionType, types.FunctionType] = {}

    def compiled(self, function: Any) -> Callable[..., Tensor]:
        """The function as compiled code; raises `TrainingError` as `run` does."""
        return partial(self.run, "The loss", self.trace(function, self.make_graph))

    def trace(self, function: Any, make_graph: Callable[..., Any]) -> Callable[..., Tensor]:
        """The function as code that `make_graph` will make when it is first called, and again for other shapes."""
        return torch.compile(self._own_copy(function), fullgraph=True, dynamic=False, backend=make_graph)

    def run(self, what: str, compiled: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Output of `compiled`; raises `TrainingError`, which names `what`, where other code would run in its place."""
        before = self.num_runs
        try:
            result = compiled(*arguments)
        except FailOnRecompileLimitHit as error:
            raise _not_compiled(what, "it met too many different shapes or settings") from error
        except Unsupported as error:
            first_line = str(error).strip().partition("\n")[0]
            raise _not_compiled(what, f"PyTorch cannot trace it ({first_line})") from error
        except RuntimeError as error:
            if "no compiled frames" in str(error):
                raise _not_compiled(what, _RUN_UNCOMPILED) from error
            raise
        if self.num_runs == before:  # PyTorch before 2.13 says nothing then
            raise _not_compiled(what, _RUN_UNCOMPILED)
        return result

    def _own_copy(self, function: Any) -> types.FunctionType:
        """The function with a code object of its own for this model: PyTorch limits the graphs of a code object, and
        several models of a process would share the limit.
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

    def make_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph that PyTorch has traced."""
        self.num_graphs += 1
        compiled = self._compile(graph, inputs)

        def run(*arguments: Any) -> Any:
            self.num_runs += 1
            return compiled(*arguments)

        return run

    def make_recomputing_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a traced graph whose backward pass runs cheap operators again, so none of their outputs is kept."""
        for node in graph.graph.nodes:
            if _CHEAP in node.meta.get("custom", ()):  # then the marks that `torch.utils.checkpoint` leaves
                node.meta.update(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=0)
        config: Any = torch.compiler.config
        with config.patch(cache_key_tag=f"{config.cache_key_tag} recomputing"):  # caches of code do not look at marks
            return self.make_graph(graph, inputs)


def marked_cheap(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call the function, and mark its operators in the traced graph as cheap to compute again."""
    with torch.fx.traceback.annotate({_CHEAP: True}):
        return function(*inputs)


@final
class CompiledCode:
    """Calls a layer's method as compiled code, which all layers share; raises `TrainingError` if other code would run.

    `recomputes_operators` says that layers keep no outputs of cheap operators.
    """

    def __init__(self, compiler: Compiler, *, recomputes_operators: bool = False) -> None:
        self._compiler = compiler
        self._make_graph = compiler.make_recomputing_graph if recomputes_operators else compiler.make_graph
        self._traced: dict[Any, Callable[..., Tensor]] = {}

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`; the function is a method of a layer."""
        if self._compiler.is_paused:
            return function(*inputs)
        assert isinstance(function, types.MethodType)
        if (method := function.__func__) not in self._traced:
            self._traced[method] = self._compiler.trace(method, self._make_graph)
        return self._compiler.run("A layer", self._traced[method], function.__self__, *inputs)


_RUN_UNCOMPILED = "PyTorch has run it uncompiled"


def _not_compiled(what: str, reason: str) -> TrainingError:
    return TrainingError(
        f"{what} must run as compiled code (`training.compile`), but does not: {reason}. Set "
        'training.compile="off", or look at what TORCH_LOGS=graph_breaks,recompiles prints.'
    )


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules whose insides are compiled and so not seen from outside."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, Block) and module.runner.compiler is not None
    )


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, run the plain code: to look into layers, or for shapes that come once. Not for training."""
    runners = [module.runner for module in model.modules() if isinstance(module, Block)]
    compilers = {runner.compiler for runner in runners if runner.compiler is not None}
    passes = model.loss_passes if isinstance(model, GPT) else None
    for compiler in compilers:
        compiler.is_paused = True
    if isinstance(model, GPT):
        model.loss_passes = None
    try:
        yield
    finally:
        for compiler in compilers:
            compiler.is_paused = False
        if isinstance(model, GPT):
            model.loss_passes = passes
