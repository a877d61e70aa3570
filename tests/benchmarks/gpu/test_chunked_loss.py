"""The plain program with a chunked loss computes the loss and the gradients of the plain program."""

import pytest
import torch

from benchmarks.contenders.plain_gpt import PlainGPT


@pytest.mark.parametrize("chunk_tokens", [5, 64])  # with a shorter last chunk, and all at once
def test_a_chunked_loss_has_the_gradients_of_all_logits(chunk_tokens):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "sequence_length": 8}
    tokens, targets = (torch.randint(0, 40, (4, 8), generator=torch.Generator().manual_seed(i)) for i in range(2))

    def trained(**options: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = PlainGPT(**sizes, **options).double()
        loss = model(tokens, targets)
        (3 * loss).backward()
        return loss, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    (loss, gradients), (of_chunks, theirs) = trained(), trained(loss_chunk_tokens=chunk_tokens)
    torch.testing.assert_close(of_chunks.double(), loss, rtol=1e-6, atol=0)
    assert len(theirs) == len(gradients) == 16
    for mine, its in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-5, atol=1e-9)


def test_a_chunked_loss_is_that_of_all_logits_under_autocast():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "sequence_length": 8}
    torch.manual_seed(0)
    model, ids = PlainGPT(**sizes, loss_chunk_tokens=10), torch.randint(0, 40, (2, 4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        of_chunks = model(*ids)
        model.loss_chunk_tokens = 0
        assert of_chunks.item() == pytest.approx(model(*ids).item(), rel=1e-2)
    of_chunks.backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
