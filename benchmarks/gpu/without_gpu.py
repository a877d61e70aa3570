"""PyTorch for CPUs, patched to generate the code of an H100. The code is never run.

All patches are here, each with its reason. They last as long as the process, so only programs that count import this
module, and before anything imports PyTorch.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FOLDER = Path(tempfile.mkdtemp(prefix="crosscut-count-"))

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=85_017_493_504,
    L2_cache_size=50 << 20, shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472, gcnArchName="",
)  # fmt: skip
"""What PyTorch tells about an H100. Inductor chooses its kernels by these properties."""


class CodeMade(BaseException):
    """Generated code was called. It cannot run here."""


def reason_against() -> str:
    """Reason why this machine cannot generate the code. Empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (python -m pip install triton)"
    return "" if shutil.which(os.environ.get("CXX", "c++")) else "no C++ compiler was found"


def _load_guard() -> None:
    """Build the guard and load it before PyTorch, which looks for a device's hooks once, when it is imported."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, _FOLDER / "guard.so"
    source = Path(__file__).with_name("cuda_guard.cpp")
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", source]
    subprocess.run([*command, "-o", library, f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
    for path in (
        *torch_folder.glob("lib/libgomp*"),
        torch_folder / "lib/libc10.so",
        torch_folder / "lib/libtorch_cpu.so",
    ):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


if reason := reason_against():
    sys.exit(f"The code of a GPU cannot be generated: {reason}.")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_FOLDER)  # a cache of other code would hide what is counted
_load_guard()

import torch

_cuda: Any = torch.cuda


def _answer_as_an_h100() -> None:
    """Answer PyTorch's questions about devices. The CPU's PyTorch raises an error for each."""
    _cuda._lazy_init = lambda: None
    _cuda.is_available = lambda: True
    _cuda.device_count = lambda: 1
    _cuda.current_device = lambda: 0
    _cuda.set_device = lambda device: None
    _cuda.synchronize = lambda *device: None
    _cuda._exchange_device = lambda device: 0
    _cuda._maybe_exchange_device = lambda device: 0
    _cuda.get_device_properties = lambda device=None: H100
    _cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    _cuda.get_device_name = lambda device=None: H100.name
    _cuda.is_bf16_supported = lambda **given: True
    _cuda.get_rng_state = lambda *device: torch.zeros(16, dtype=torch.uint8)
    _cuda.set_rng_state = lambda *given: None
    torch.version.cuda = "13.0"
    answers: dict[str, Callable[..., Any]] = {
        "_cuda_getCurrentRawStream": lambda device: 0, "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda device: 0, "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_setDevice": lambda device: None,
    }  # fmt: skip
    for name, answer in answers.items():  # CUDA's part of PyTorch, which is not there
        setattr(torch._C, name, answer)


_answer_as_an_h100()  # before the compiler is imported, which keeps these functions

import torch._dynamo.device_interface
import torch._functorch.config
import torch._inductor.config
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.misc_patterns
import torch._inductor.fx_passes.pad_mm
import torch.utils._triton
from torch import Tensor
from torch._inductor.graph import GraphLowering


def _generate_without_device() -> None:
    """Skip what Inductor does on a device while it compiles."""
    worker: Any = torch._dynamo.device_interface.CudaInterface.Worker
    worker.get_device_properties = staticmethod(lambda device=None: H100)
    worker.current_device = staticmethod(lambda: 0)
    triton: Any = torch.utils._triton
    triton.has_triton = lambda: True  # asks the driver
    triton.triton_hash_with_backend = lambda: "0" * 64  # asks the driver
    passes: Any = torch._inductor.fx_passes
    # These patterns are traced from real tensors on the device. They replace attention that is written out, products of
    # odd sizes and random permutations, none of which a layer has.
    passes.fuse_attention._sfdp_init = lambda *given: None
    passes.pad_mm._pad_mm_init = lambda *given: None
    passes.misc_patterns._misc_patterns_init = lambda *given: None
    inductor: Any = torch._inductor.config
    inductor.fx_graph_cache, inductor.compile_threads = False, 1
    functorch: Any = torch._functorch.config
    functorch.enable_autograd_cache = False
    functorch.force_non_lazy_backward_lowering = True  # the forward pass never runs, so no backward pass would come


def _attend_as_an_h100() -> None:
    """Attend with cuDNN, which PyTorch chooses on an H100. The choice is in CUDA's part of PyTorch."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False,
        dropout_p: float = 0.0, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert attn_mask is None, "with a mask, PyTorch chooses another kernel"
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        result: Tensor = attention(q, k, v, None, True, dropout_p, is_causal, False, scale=scale)[0]
        return result

    torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]


def on_code(hear: Callable[[GraphLowering, str], None]) -> None:
    """Call `hear` with each graph that Inductor has lowered and with the code that it has generated. Calls of the code
    raise `CodeMade`.
    """

    def call(arguments: object) -> None:
        raise CodeMade

    def hear_code(graph: GraphLowering) -> SimpleNamespace:
        code, _ = graph.codegen()
        hear(graph, code.value)
        return SimpleNamespace(call=call, runner=None, __file__="")

    GraphLowering.compile_to_module = hear_code  # type: ignore[assignment, method-assign]


_generate_without_device()
_attend_as_an_h100()
