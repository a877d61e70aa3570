"""Plans of mixtures of experts: what uneven loads and expert ranks cost."""

from dataclasses import replace

import pytest

from crosscut.architecture import Operation, Target, describe, layer_parameters
from crosscut.config import ConfigError, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.planner import Candidate, forecast_memory, step_traffic
from crosscut.planner.activations import layer_activations
from crosscut.planner.candidate import possible_skew
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.messages.exchange import collective_seconds
from crosscut.planner.passes import optimizer_bytes
from crosscut.planner.program import crosscut_program
from crosscut.planner.search import Plans, search_layouts
from crosscut.planner.search.proposals import layouts_of
from crosscut.planner.time import step_time
from tests.refusals import refusal

H100 = KNOWN_HARDWARE["h100-sxm"]
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=1024,
    num_heads=8,
    vocab_size=1024,
    dropout=0.0,
    biases="none",
    layers=("attention experts",),
    experts={"number": 16, "per_token": 4, "size": 512},
)
TOKENS = 2 * 1024
"""Tokens of a rank's micro-batch."""


def planned(layout: Layout, *, skew: float = 1.0, **training: object) -> Candidate:
    settings = {"batch_size": 4 * layout.data, "micro_batch_size": 2, "precision": "bfloat16", "device": "cuda"}
    options = TrainingConfig(**{**settings, "compile": "off", **training})  # type: ignore[arg-type]
    return Candidate(MODEL, layout, options, expert_skew=skew)


EVEN, UNEVEN = (planned(Layout(data=4, expert=4), skew=skew) for skew in (1.0, 1.5))


def test_the_fullest_rank_keeps_the_rows_that_it_receives() -> None:
    """In bfloat16: rows of the hidden size, and two products and an activation of an expert's width; and in wider types
    the weight and two places of each row.
    """
    row = (1024 + 3 * 512) * 2 + 4 + 2 * 8
    more = layer_activations(UNEVEN).total - layer_activations(EVEN).total
    assert more == 0.5 * 4 * TOKENS * row
    assert forecast_memory(UNEVEN).activations > forecast_memory(EVEN).activations + 2 * more


def test_the_fullest_rank_multiplies_and_sends_the_rows_that_it_receives() -> None:
    ideal = replace(H100, memory_bandwidth=1e30, multiprocessors=0, start=0.0, products_attained=1.0)
    even, uneven = (step_time(run, ideal) for run in (EVEN, UNEVEN))
    flops = 2 * 3 * 4 * TOKENS * 3 * 2 * 1024 * 512  # 2 layers, 3 products for each of 3 matrices, 2 micro-batches
    assert uneven.products - even.products == pytest.approx(2 * 0.5 * flops / 989e12)
    assert uneven.attention == even.attention
    sent = [{c.purpose: c.elements for c in step_traffic(run) if c.axis == "expert"} for run in (EVEN, UNEVEN)]
    assert {name: after / sent[0][name] for name, after in sent[1].items()} == {
        "mlp rows": 1.5,
        "mlp results": 1.5,
        "gradient norm of all experts": 1.0,
    }


def test_a_rank_receives_at_most_what_all_tokens_may_send_to_it() -> None:
    """Two ranks at most double the mean. Of 16 ranks, one has one expert, which receives one of a token's four rows."""
    for ranks, most in ((1, 1), (2, 2), (16, 4)):
        assert possible_skew(planned(Layout(data=16, expert=ranks), skew=9.0)) == most


def test_rows_and_results_go_there_and_back_in_both_passes() -> None:
    found = [c for c in step_traffic(EVEN) if c.axis == "expert" and c.operation == Operation.ALL_TO_ALL]
    rows, weights, counts = 4 * TOKENS * 1024, 4 * TOKENS, 16
    forward = [(c.elements, c.element_bytes, c.count) for c in found if c.phase == "forward"]
    backward = [(c.elements, c.element_bytes, c.count) for c in found if c.phase == "backward"]
    assert forward == [(counts, 8, 4), (rows, 2, 4), (weights, 4, 4), (rows, 2, 4)]
    assert backward == [(rows, 2, 4), (weights, 4, 4), (rows, 2, 4)]


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_them(sharding: str) -> None:
    layout = Layout(data=8, expert=2, sharding=sharding)
    found = step_traffic(planned(layout, micro_batch_size=4))
    of_experts = [c for c in found if c.axis == "expert_data" and "gradients" in c.purpose]
    parameters = [p for p in layer_parameters(describe(MODEL).layers[0], Target.of(layout)) if p.is_expert]
    elements = sum(p.size for p in parameters)
    assert elements == 8 * 3 * 1024 * 512
    assert {c.ranks for c in of_experts} == {4}
    assert sum(c.count * c.elements for c in of_experts) == 2 * elements


def test_messages_of_experts_and_of_other_parameters_share_what_hides_them() -> None:
    found = {c.purpose: c for c in step_traffic(planned(Layout(data=8, expert=2, sharding="zero3")))}
    dense, experts = found["layer weights"], found["expert weights"]
    assert dense.share + experts.share == pytest.approx(1.0)
    assert experts.share / dense.share == pytest.approx(
        experts.wire_bytes / dense.wire_bytes * dense.count / experts.count
    )


def test_the_optimizer_copies_only_gradients_that_are_summed() -> None:
    alone, together = (planned(Layout(data=4, expert=expert)) for expert in (4, 2))
    parameters = [sum(p.size for p in layer_parameters(describe(MODEL).layers[0], Target.of(run.layout)) if p.is_expert)
                  for run in (alone, together)]  # fmt: skip
    moved = [optimizer_bytes(run, crosscut_program(run, H100)) for run in (alone, together)]
    assert moved[1] - moved[0] == pytest.approx(2 * (52 * parameters[1] - 36 * parameters[0]))


@pytest.mark.parametrize(("data", "inside", "outside"), [(8, 7 / 8, 0), (32, 7 / 32, 24 / 32)])
def test_an_all_to_all_goes_inside_the_node_and_between_nodes_at_once(data: int, inside: float, outside: float) -> None:
    run = replace(planned(Layout(data=data, expert=data)), model=replace(MODEL, experts={"number": 32, "size": 64}))
    rows = next(c for c in step_traffic(run) if c.purpose == "mlp results")
    where, seconds = collective_seconds(rows, run, H100)
    link, num_bytes = getattr(H100, where), rows.elements * 2
    assert where == ("network" if outside else "node")
    assert H100.network is not None
    longer = max(inside * num_bytes / H100.node.rate, outside * num_bytes / H100.network.rate)
    assert seconds == pytest.approx((data - 1) * link.latency + longer)


def search(num_ranks: int = 2, *, skew: float = 1.0, **model: object) -> Plans:
    run = RunConfig(
        model=replace(MODEL, **model),  # type: ignore[arg-type]
        training=TrainingConfig(batch_size=num_ranks, precision="bfloat16"),
    )
    return search_layouts(run, H100, num_ranks, expert_skew=skew)


def test_every_number_of_expert_ranks_is_tried_or_refused_with_a_reason() -> None:
    plans = search(12)
    whole = {plan.candidate.layout.expert for plan in plans.fitting if plan.candidate.layout.data == 12}
    assert whole == {1, 2, 4}
    reasons = {entry.label: entry.reason for entry in plans.rejected}
    for ranks in (3, 6, 12):
        name = f"tensor 1 x data 12, expert {ranks}"
        assert reasons[name] == f"16 experts cannot be divided evenly over {ranks} expert ranks"
    assert all(plan.run(plans.asked).layout.expert == plan.candidate.layout.expert for plan in plans.fitting)


def test_groups_that_share_a_copy_hold_whole_groups_of_experts() -> None:
    for expert, groups in ((1, {0, 8}), (8, {0, 8}), (16, {0})):
        run = planned(Layout(data=16, expert=expert))
        assert {layout.shard_group for layout in layouts_of(run, H100, run.layout)} == groups


def test_uneven_loads_make_layouts_with_expert_ranks_slower_and_no_others() -> None:
    def seconds(skew: float) -> dict[tuple[object, ...], float]:
        return {
            (str(p.candidate.layout), p.candidate.training.recompute, p.candidate.training.recompute_every,
             p.candidate.micro_batch_size): p.time.total
            for p in search(4, skew=skew).fitting if p.candidate.layout.num_stages == 1
        }  # fmt: skip

    even, uneven = seconds(1.0), seconds(1.5)
    slower = {key: uneven[key] / even[key] for key in even}
    assert min(ratio for key, ratio in slower.items() if "expert" in str(key[0])) > 1.01
    assert {ratio for key, ratio in slower.items() if "expert" not in str(key[0])} == {1.0}


def test_a_skew_that_cannot_be_is_refused() -> None:
    assert refusal(ConfigError, search, skew=0.5) == (
        "`--expert-skew` must be at least 1 and finite, but is 0.5. 1 means that all expert ranks have equal loads; "
        "1.5 means that the fullest one has one and a half times the mean."
    )
    dense = {"layers": ("attention swiglu",)}
    assert refusal(ConfigError, search, skew=2.0, **dense) == (
        "`--expert-skew` must be 1 for a model without experts, but is 2. Remove `--expert-skew`."
    )
