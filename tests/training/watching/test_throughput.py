import os

import pytest
import torch
import torch.distributed as dist

from crosscut.parallel import make_mesh
from crosscut.planner import model_flops_per_token
from crosscut.training.precision import resolve_on
from crosscut.training.watching.throughput import Throughput, find_peak, measure_matrix_rate
from tests.training.jobs import CPU


def throughput_of(run) -> tuple[Throughput, dict[str, float]]:
    throughput = Throughput.of(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    return throughput, throughput.rates(0.5, num_tokens=4 * 32)


def test_rates_are_the_planners_flops(ranks, run_with):
    run = run_with()
    throughput, rates = ranks.run(1, throughput_of, run)[0]
    assert rates["tokens_per_second"] == 4 * 32 / 0.5
    assert rates["model_flops_per_second"] == rates["tokens_per_second"] * model_flops_per_token(run.model, 32)
    assert rates["utilisation"] == rates["model_flops_per_second"] / throughput.peak.flops_per_second
    assert throughput.peak.name == "float32 matrix rate measured"


def test_measured_peak_is_of_all_ranks_together(ranks, run_with):
    results = ranks.run(2, throughput_of, run_with("layout.tensor=2"))
    peaks = {throughput.peak for throughput, _ in results}
    assert len(peaks) == 1
    assert "on 2 ranks at once" in peaks.pop().name


def rate_on_one_core() -> float:
    """Rate of this rank while it shares the first core with the other ranks."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        dist.barrier()
        return measure_matrix_rate(CPU, torch.float32, size=256)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind a process to a core")
def test_ranks_that_share_a_core_do_not_count_it_once_each(ranks):
    ratios = (sum(ranks.run(4, rate_on_one_core)) / sum(ranks.run(1, rate_on_one_core)) for _ in range(10))
    assert any(ratio < 1.8 for ratio in ratios)  # the best products of four ranks would make it 4


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
