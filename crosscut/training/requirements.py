"""Requirements of a run on this machine, checked before its ranks start."""

from crosscut.config import ResolvedRun
from crosscut.launch.processes import choose_device
from crosscut.parallel import require_symmetric_memory
from crosscut.training.precision import require_imitable_precision, require_precision
from crosscut.training.speed.compilation import require_compilation


def require_capabilities(run: ResolvedRun, *, only_to_verify: bool = False) -> None:
    """Check that this machine supports the precision, the compilation and the symmetric memory that the run asks for.

    With `only_to_verify`, a precision is also accepted if PyTorch emulates its 8-bit matrix products in software.
    Raises `ConfigError`, or `LayoutError` if symmetric memory is not supported.
    """
    device = choose_device(run.device)
    (require_imitable_precision if only_to_verify else require_precision)(run.precision, device)
    require_compilation(run, device)
    require_symmetric_memory(run.layout, device)
