"""SmolLM2-135M-Instruct: adapters that three tensor ranks train are those of one rank."""

import pytest

from crosscut.pretrained import export_checkpoint, find_model
from tests.finetuning.chat.conftest import chats, write_chats
from tests.finetuning.downstream.conftest import finetune, rows_of
from tests.pretrained.test_export import tensors_in

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_three_ranks_train_the_adapters_of_one(smollm2, tmp_path, forked_ranks):
    path = write_chats(tmp_path / "chats.jsonl", chats(24))
    for tensor in (1, 3):
        finetune(
            "chat", path, "--model", smollm2, "--output", tmp_path / str(tensor), "--lora-rank", "8",
            f"layout.tensor={tensor}", "training.steps=3", "training.batch_size=2", "training.sequence_length=128",
            "training.precision=float64", "training.device=cpu",
        )  # fmt: skip
        export_checkpoint(find_model(tmp_path / str(tensor)), tmp_path / f"merged-{tensor}")
    one, three = (rows_of(tmp_path / str(tensor), "loss") for tensor in (1, 3))
    assert one[-1] < one[0]
    assert one == pytest.approx(three, rel=1e-8)
    initial, merged = tensors_in(smollm2), [tensors_in(tmp_path / f"merged-{tensor}") for tensor in (1, 3)]
    change = max(float((merged[0][name].float() - initial[name]).abs().max()) for name in initial)
    apart = max(float((merged[0][name].double() - merged[1][name].double()).abs().max()) for name in initial)
    assert change > 1e-4
    assert apart < 1e-3 * change
