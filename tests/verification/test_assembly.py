"""Parts of known tensors, put together again."""

import pytest
import torch

from crosscut.verification.assembly import assemble_activation, assemble_parameter, grid_of

B, S, H = 4, 6, 8
WHOLE = torch.arange(B * S * H, dtype=torch.float64).view(B, S, H)


def cut(data: int, tensor: int, tensor_dim: int | None) -> list[torch.Tensor]:
    """By data ranks along the batch, by tensor ranks along a dimension or not at all."""
    rows = WHOLE.chunk(data)
    return [part for row in rows for part in ([row] * tensor if tensor_dim is None else row.chunk(tensor, tensor_dim))]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("tensor_dim", [None, 1, 2])
def test_activation_comes_together_however_it_is_cut(data, tensor, tensor_dim):
    assembled = assemble_activation(grid_of(cut(data, tensor, tensor_dim), tensor), WHOLE, is_gradient=False)
    assert assembled is not None
    assert torch.equal(assembled.whole, WHOLE)
    assert assembled.copies_differ == []


def test_of_two_arrangements_that_fit_the_shape_the_right_one_is_taken():
    square = torch.arange(16.0).view(4, 4)
    parts = [part for row in square.chunk(2) for part in row.chunk(2, 1)]
    assembled = assemble_activation(grid_of(parts, 2), square, is_gradient=False)
    assert assembled is not None
    assert torch.equal(assembled.whole, square)


def test_shapes_that_do_not_add_up_have_no_arrangement():
    assert assemble_activation([[WHOLE, WHOLE[:, :3]]], WHOLE, is_gradient=False) is None
    assert assemble_activation([[WHOLE[:, :2], WHOLE[:, :2]]], WHOLE, is_gradient=False) is None


def test_copies_that_differ_in_one_bit_are_told_with_their_ranks():
    other = WHOLE.clone()
    other[1, 2, 3] = torch.nextafter(other[1, 2, 3], torch.tensor(torch.inf, dtype=torch.float64))
    assembled = assemble_activation([[WHOLE, other]], WHOLE, is_gradient=False)
    assert assembled is not None
    assert assembled.copies_differ == [(0, 1)]


def test_what_data_ranks_share_has_its_gradient_summed():
    shared = torch.randn(S, H).double()
    parts = [[0.25 * shared], [0.75 * shared]]
    assembled = assemble_activation(parts, shared, is_gradient=True)
    assert assembled is not None
    torch.testing.assert_close(assembled.whole, shared, rtol=1e-14, atol=0.0)


def test_padding_of_the_vocabulary_is_left_out_and_must_be_zero():
    like = torch.cat([WHOLE[0], torch.zeros(2, H, dtype=torch.float64)])  # the uncut one is padded too, to 8 rows
    padded = torch.cat([WHOLE[0], torch.zeros(6, H, dtype=torch.float64)])
    assembled = assemble_parameter([list(padded.chunk(4))], 0, like)
    assert assembled is not None
    assert torch.equal(assembled.whole, like)
    padded[-1, 0] = 1e-9
    spoilt = assemble_parameter([list(padded.chunk(4))], 0, like)
    assert spoilt is not None
    assert not spoilt.whole.isfinite().all()


@pytest.mark.parametrize("dim", [0, 1])
def test_parameter_comes_together_by_its_own_word(dim):
    matrix = WHOLE[0]
    grid = [list(matrix.chunk(2, dim)), list(matrix.chunk(2, dim))]
    assembled = assemble_parameter(grid, dim, matrix)
    assert assembled is not None
    assert torch.equal(assembled.whole, matrix)
    grid[1][0] = grid[1][0] + 1
    drifted = assemble_parameter(grid, dim, matrix)
    assert drifted is not None
    assert drifted.copies_differ == [(0, 2)]
