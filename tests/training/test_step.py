import pytest
import torch

from crosscut.config import OptimizerConfig
from crosscut.training.optimization.optimizer import Rules, make_optimizer
from crosscut.training.result import NonFiniteError
from crosscut.training.watching.diagnosis import explain_non_finite
from tests.training.jobs import losses_of, masked_loss_and_gradient, parts, poisoned_step


def decays_of(run) -> dict[str, float]:
    trainer, _ = parts(run)
    decay = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    return {name: decay[id(p)] for name, p in trainer.model.named_parameters()}


def test_biases_and_layer_norms_do_not_decay(ranks, run_with):
    decays = ranks.run(1, decays_of, run_with())[0]
    assert decays["tokens.weight"] == decays["blocks.0.mlp.expand.weight"] == 0.01
    assert decays["blocks.0.mlp.expand.bias"] == decays["final_norm.weight"] == decays["final_norm.bias"] == 0.0
    assert {name for name, value in decays.items() if value} == {
        name for name in decays if name.endswith("weight") and "norm" not in name
    }


def test_micro_batches_on_data_ranks_add_up_to_the_whole_batch(ranks, run_with):
    options = ("model.dropout=0.0", "training.precision=float64")
    whole = ranks.run(1, losses_of, run_with(*options), 3)[0]
    split = ranks.run(2, losses_of, run_with(*options, "training.micro_batch_size=1", "layout.data=2"), 3)
    assert split[0] == split[1]
    assert split[0] == pytest.approx(whole, rel=1e-10)


def test_loss_is_normalised_by_the_targets_of_all_ranks_and_micro_batches(ranks, run_with):
    ignored = [0, 0, 31, 20]  # the second rank has far fewer targets than the first
    base = ("model.dropout=0.0", "training.precision=float64")
    loss, gradients = ranks.run(1, masked_loss_and_gradient, run_with(*base), ignored)[0]
    run = run_with(*base, "layout.data=2", "training.micro_batch_size=1")
    split_loss, split_gradients = ranks.run(2, masked_loss_and_gradient, run, ignored)[0]
    assert split_loss == pytest.approx(loss, rel=1e-12)
    for one, other in zip(gradients, split_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def losses_without_an_update(run, steps: list[int]) -> list[float]:
    trainer, batches = parts(run)
    micro_batches = batches.micro_batches(0)
    return [trainer.summed(trainer.accumulate(step, micro_batches)).item() for step in steps]


def test_dropout_repeats_at_the_same_step_and_differs_at_another(ranks, run_with):
    first, other, again = ranks.run(1, losses_without_an_update, run_with(), [0, 1, 0])[0]
    assert again == first
    assert other != first
    first, other = ranks.run(1, losses_without_an_update, run_with("model.dropout=0.0"), [0, 1])[0]
    assert other == first, "nothing but dropout is drawn"


def test_bfloat16_arithmetic_stays_near_float32(ranks, run_with):
    exact = ranks.run(1, losses_of, run_with("model.dropout=0.0"), 6)[0]
    rough = ranks.run(1, losses_of, run_with("model.dropout=0.0", "training.precision=bfloat16"), 6)[0]
    assert rough == pytest.approx(exact, rel=2e-3)
    assert rough != exact


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [("layout.tensor=2", "layout.sequence_parallel=true"), ("layout.tensor=1",)])
def test_float8_products_train_near_bfloat16(ranks, run_with, options):
    base = ("model.dropout=0.0", "optimizer.learning_rate=3e-3")
    wide = ranks.run(1, losses_of, run_with(*base, "training.precision=bfloat16"), 6)[0]
    run = run_with(*base, *options, "training.precision=float8")
    for narrow in ranks.run(run.layout.world_size, losses_of, run, 6):
        assert narrow == pytest.approx(wide, rel=5e-3)
        assert narrow != wide
        assert narrow[-1] < 0.97 * narrow[0], "nothing was learned"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [("layout.tensor=2", "layout.sequence_parallel=true"), ("layout.tensor=2",)])
def test_bfloat16_arithmetic_on_two_tensor_ranks_stays_near_one(ranks, run_with, options):
    base = ("model.dropout=0.0", "training.precision=bfloat16")
    whole = ranks.run(1, losses_of, run_with(*base), 4)[0]
    cut = ranks.run(2, losses_of, run_with(*base, *options), 4)
    assert cut[0] == cut[1]
    assert cut[0] == pytest.approx(whole, rel=2e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["layout.data=2", "layout.tensor=2"])
def test_non_finite_step_names_layer_and_documents_and_changes_nothing(ranks, run_with, layout):
    run = run_with(layout, "model.dropout=0.0")
    told = ranks.run(2, poisoned_step, run, "blocks.1.mlp.expand.weight", float("nan"))
    assert all(t["unchanged"] for t in told)
    assert len({t["message"] for t in told}) == 1
    message = told[0]["message"]
    assert "at step 1 they are not" in message
    assert "value appeared in the output of `blocks.1.mlp.expand`" in message
    assert "addresses.txt:" in message
    assert "--resume" in message


def test_non_finite_gradient_of_a_finite_loss_names_the_parameter(ranks, run_with):
    told = ranks.run(1, overflowing_gradient, run_with("model.dropout=0.0"))[0]
    assert "the gradient of `blocks.1.mlp.contract.bias`" in told


def overflowing_gradient(run) -> str:
    trainer, batches = parts(run)
    bias = dict(trainer.model.named_parameters())["blocks.1.mlp.contract.bias"]
    bias.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteError) as failure:
        trainer.step(0, batches.micro_batches(0)).wait()
    return str(explain_non_finite(failure.value, trainer, batches))


def broken_once(run) -> str:
    """On a rank: the first data rank's gradient is NaN in the first pass only, as after a fault of the memory."""
    trainer, batches = parts(run)
    bias = dict(trainer.model.named_parameters())["blocks.1.mlp.contract.bias"]
    first = trainer.mesh.data.rank == 0
    handle = bias.register_hook(lambda gradient: gradient * (float("nan") if first else 1.0))
    with pytest.raises(NonFiniteError) as failure:
        trainer.step(0, batches.micro_batches(0)).wait()
    handle.remove()
    return str(explain_non_finite(failure.value, trainer, batches))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["layout.data=2", "layout.tensor=2"])
def test_non_finite_gradient_that_does_not_come_back_is_a_fault_of_the_machine(ranks, run_with, layout):
    told = ranks.run(2, broken_once, run_with(layout, "model.dropout=0.0"))
    assert len({*told}) == 1
    assert told[0] == (
        "The loss and its gradient must be finite, but at step 1 they were not. The same step, repeated, is finite, so "
        "neither the documents nor the learning rate are the cause. Probably a value has changed in the memory of a "
        "device. The weights and checkpoints are those from before the step. Check the machines for failing memory or "
        "a failing device, and run again with --resume auto."
    )


def test_weight_decay_is_decoupled():
    layer = torch.nn.Linear(3, 2)
    start = layer.weight.detach().clone()
    optimizer = make_optimizer(
        layer, OptimizerConfig(learning_rate=0.5, weight_decay=0.1), rules=Rules(undecayed={"bias"})
    )
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), start * (1 - 0.5 * 0.1))
