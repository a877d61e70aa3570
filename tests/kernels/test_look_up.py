"""The look-up whose rows share one gradient with the weight's other use, against autograd's own sum."""

import torch
import torch.nn.functional as F

from crosscut.kernels.look_up import look_up


def test_both_uses_gradients_are_added_up() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, factor = (torch.randint(-9, 10, shape, generator=generator).double() for shape in ((7, 3), (3, 4)))
    index = torch.tensor([[0, 6, 6], [2, 0, 6]])
    found = []
    for shared in (True, False):
        leaf = weight.clone().requires_grad_()
        rows, again = look_up(leaf, index) if shared else (F.embedding(index, leaf), leaf)
        assert torch.equal(rows, weight[index])
        assert torch.equal(again, weight)
        (rows.square().sum() + (again @ factor).square().sum()).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_rows_are_added_in_place_to_the_gradient_of_the_other_use() -> None:
    given: list[torch.Tensor] = []
    leaf = torch.ones(7, 3, requires_grad=True)
    rows, again = look_up(leaf, torch.tensor([1, 1]))
    again.register_hook(given.append)
    gradient = torch.autograd.grad((rows.sum() + (2 * again).sum()), leaf)[0]
    assert gradient.data_ptr() == given[0].data_ptr()
    assert torch.equal(gradient, 2 + 2 * (torch.arange(7) == 1).float().unsqueeze(1).expand(7, 3))
