import pytest
import torch

from crosscut.parallel import make_mesh
from crosscut.planner import model_flops_per_token
from crosscut.training.precision import resolve_on
from crosscut.training.watching import throughput
from crosscut.training.watching.throughput import Throughput, find_peak, measure_matrix_rate
from tests.training.jobs import CPU


def throughput_of(run) -> tuple[Throughput, dict[str, float]]:
    found = Throughput.of(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    return found, found.rates(0.5, num_tokens=4 * 32)


def test_rates_are_the_planners_flops(ranks, run_with):
    run = run_with()
    found, rates = ranks.run(1, throughput_of, run)[0]
    assert rates["tokens_per_second"] == 4 * 32 / 0.5
    assert rates["model_flops_per_second"] == rates["tokens_per_second"] * model_flops_per_token(run.model, 32)
    assert rates["utilisation"] == rates["model_flops_per_second"] / found.peak.flops_per_second
    assert found.peak.name == "float32 matrix rate measured"
    fastest = 4 * 32 * found.flops_per_token / found.peak.flops_per_second
    assert found.rates(fastest * 1.001, num_tokens=4 * 32)["utilisation"] == pytest.approx(1, rel=0.01)
    faster = found.rates(fastest / 1.12, num_tokens=4 * 32)
    assert faster["utilisation"] is None, "112% of a peak is no peak"
    assert faster["model_flops_per_second"] > found.peak.flops_per_second


def test_measured_peak_is_of_all_ranks_together(ranks, run_with):
    results = ranks.run(2, throughput_of, run_with("layout.tensor=2"))
    peaks = {found.peak for found, _ in results}
    assert len(peaks) == 1
    assert "on 2 ranks at once" in peaks.pop().name


class SharedCore:
    """Clock of a rank that shares a core with others. A product takes 1 ms of the core. After every fourth product, the
    core is with the other ranks for four products of each of them.
    """

    def __init__(self, num_ranks: int) -> None:
        self.now, self.waiting, self.products = 0.0, 4e-3 * (num_ranks - 1), 0

    def perf_counter(self) -> float:
        return self.now

    def output(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.products += 1
        self.now += 1e-3 + (self.waiting if self.products % 4 == 0 else 0.0)


def rate_on(core: SharedCore) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", core)
        patch.setattr(throughput, "ORDINARY", core)
        patch.setattr(throughput, "_SECONDS_TO_MEASURE", 0.1)  # the tests make it shorter
        return measure_matrix_rate(CPU, torch.float32, size=8)


def test_ranks_that_share_a_core_do_not_count_it_once_each():
    """The core's scheduler decides on the times, so a clock takes its place."""
    alone = rate_on(SharedCore(1))
    assert alone == pytest.approx(2 * 8**3 / 1e-3)
    assert 4 * rate_on(SharedCore(4)) == pytest.approx(alone, rel=0.2)  # of the best products: 4 times as much


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_rate_is_a_plausible_number(dtype):
    assert 1e8 < measure_matrix_rate(CPU, dtype, size=256) < 1e14


def known_gpu(run) -> str:
    """As if every rank had an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
        mesh = make_mesh(run.layout, CPU)
        object.__setattr__(mesh, "device", torch.device("cuda", 0))
        peak = find_peak("bfloat16", mesh)
    assert peak.flops_per_second == 2 * 989e12
    return peak.name


def test_known_gpus_have_their_published_peak(ranks, run_with):
    name = ranks.run(2, known_gpu, run_with("layout.tensor=2"))[0]
    assert name.startswith("2 x H200")
    assert name.endswith("published dense bfloat16 peak")
