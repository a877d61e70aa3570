"""The forecast of memory: what each setting changes, and what a search over layouts takes.

That it is what a step holds is shown by the dry run (tests/rehearsal) and by benchmarks/planner/planned_memory.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig, load_run, padded_vocab_size
from crosscut.planner import Candidate, forecast_memory, layer_activations, parameters_per_rank
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.memory import forecast_instants, instants
from tests.timing import quickest

MODEL = ModelConfig(**PRESETS["megatron-1.2b"])
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def make_run(layout: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    chosen = Layout(**(layout or {}))
    options = {"batch_size": 8 * chosen.data, "precision": "bfloat16", **training}
    return RunConfig(model=MODEL, layout=chosen, training=TrainingConfig(**options))


@pytest.mark.parametrize(("device", "precision"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_a_run_without_a_precision_counts_as_in_the_devices_own(device: Any, precision: str) -> None:
    auto, same = (make_run(precision=p) for p in ("auto", precision))
    assert forecast_memory(auto, device=device) == forecast_memory(same, device=device)
    assert layer_activations(auto, device=device) == layer_activations(same, device=device)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("gpt3-175b", "a100-80gb"), ("mt-nlg-530b", "a100-80gb"), ("turing-nlg-17b", "v100-32gb")],
)
def test_the_published_layout_of_a_large_model_fits_its_gpus(name: str, gpu: str) -> None:
    run, hardware = load_run(EXAMPLES / f"{name}.toml"), KNOWN_HARDWARE[gpu]
    ranks = range(run.layout.pipeline)
    totals = [forecast_memory(Candidate.at(run, rank), device="cuda").total for rank in ranks]
    assert max(totals) < hardware.memory


def test_state_is_twelve_bytes_a_parameter_in_mixed_precision() -> None:
    run = make_run()
    forecast = forecast_memory(run)
    parameters = parameters_per_rank(MODEL, run.layout)
    assert (forecast.master_weights, forecast.optimizer) == (4 * parameters, 8 * parameters)


def test_one_precision_has_no_master_weights() -> None:
    forecast = forecast_memory(make_run(precision="float32"))
    assert forecast.master_weights == 0
    assert forecast.weights == 4 * parameters_per_rank(MODEL, Layout())


def test_sharding_divides_the_state_by_the_ranks_that_share_it() -> None:
    whole, shared = (forecast_memory(make_run({"data": 8, "sharding": s})) for s in ("none", "zero3"))
    assert whole.optimizer / shared.optimizer > 7.99
    assert shared.buffers > 0


def test_recomputation_and_split_sequences_leave_less_activations() -> None:
    layouts = ({"tensor": 4}, {"tensor": 4, "sequence_parallel": True})
    plain, split = (forecast_memory(make_run(layout)).activations for layout in layouts)
    again = forecast_memory(make_run(layouts[1], recompute="full")).activations
    assert plain > split > 4 * again


def test_documents_add_one_mask_and_one_set_of_cosines_and_sines_for_all_layers() -> None:
    plain, masked = (make_run({"tensor": 4}, document_mask=mask) for mask in (False, True))
    size, length, sequences = 2, 1024, 8
    more = sequences * length**2 * size + sequences * length * 8  # learned positions are an index of 8 bytes
    assert forecast_memory(masked).activations - forecast_memory(plain).activations == more
    rotary = replace(MODEL, positions="rotary")
    before, after = (forecast_memory(replace(run, model=rotary)).activations for run in (plain, masked))
    assert after - before == sequences * length * (length + 2 * MODEL.head_size) * size


def test_offloaded_moments_are_not_on_the_device_but_in_two_places() -> None:
    run = make_run(offload=("optimizer",))
    forecast = forecast_memory(run)
    assert forecast.optimizer == 0
    step = next(instant for instant in forecast_instants(run) if instant.instant == "step")
    assert step.buffers == 4 * instants.PIECE_ELEMENTS * 4


def test_of_all_gradients_only_those_of_the_last_bucket_are_there_twice(monkeypatch) -> None:
    everything = 4 * parameters_per_rank(MODEL, Layout())
    monkeypatch.setattr(instants, "BUCKET_BYTES", 1 << 40)
    reduction = {i.instant: i for i in forecast_instants(make_run({"data": 2}))}["reduction"]
    assert (reduction.gradients, reduction.buffers) == (everything, everything)
    monkeypatch.setattr(instants, "BUCKET_BYTES", 1024)
    reduction = {i.instant: i for i in forecast_instants(make_run({"data": 2}))}["reduction"]
    vocabulary = 4 * padded_vocab_size(MODEL.vocab_size, 1) * MODEL.hidden_size
    assert reduction.gradients == everything
    assert vocabulary <= reduction.buffers < vocabulary + 1024


def test_gradients_are_there_from_the_second_micro_batch_on() -> None:
    one, two = (forecast_memory(make_run(batch_size=b, micro_batch_size=4)) for b in (4, 8))
    assert two.gradients - one.gradients == 4 * parameters_per_rank(MODEL, Layout())
    assert two.activations == one.activations


def test_only_a_device_of_its_own_has_an_allowance() -> None:
    assert forecast_memory(make_run(), device="cpu").allowance == 0
    on_gpu = forecast_memory(make_run())
    passing = on_gpu.total - on_gpu.allowance - on_gpu.master_weights - on_gpu.optimizer
    assert on_gpu.allowance == int(instants.FRAGMENTATION * passing)


def test_a_candidate_is_forecast_as_its_run() -> None:
    run = make_run({"tensor": 2, "data": 4, "sharding": "zero2"}, recompute="operators", micro_batch_size=2)
    assert forecast_memory(Candidate(run.model, run.layout, run.training)) == forecast_memory(run)


def test_a_search_of_ten_thousand_layouts_takes_seconds() -> None:
    run = make_run()

    def search() -> None:
        for data in range(1, 501):
            forecast_memory(Candidate(MODEL, Layout(tensor=8, data=data), replace(run.training, batch_size=data)))

    assert quickest(search, limit=0.25) < 0.25  # a twentieth of the 5 s that 10,000 may take
