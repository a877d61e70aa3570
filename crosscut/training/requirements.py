"""Requirements of a run on the machine it is started on, checked before its ranks begin."""

from crosscut.config import ResolvedRun
from crosscut.launch.processes import choose_device
from crosscut.parallel import require_symmetric_memory
from crosscut.training.precision import require_imitable_precision, require_precision
from crosscut.training.speed.compilation import require_compilation


def require_capabilities(run: ResolvedRun, *, only_to_verify: bool = False) -> None:
    """Raise `ConfigError` or `LayoutError` where a fusion, an overlap or a precision of the run cannot be had here.

    With `only_to_verify`, products in 8 bits may be imitated ones.
    """
    device = choose_device(run.device)
    (require_imitable_precision if only_to_verify else require_precision)(run.precision, device)
    require_compilation(run, device)
    require_symmetric_memory(run.layout, device)
