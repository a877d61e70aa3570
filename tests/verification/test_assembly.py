"""Parts of known tensors, put together again."""

import pytest
import torch

from crosscut.config.axes import AxisRole
from crosscut.parallel.context import split_zigzag
from crosscut.verification.assembly import (
    Assembled,
    Grid,
    assemble_activation,
    assemble_columns,
    assemble_parameter,
    assemble_places,
)

B, S, H = 4, 6, 8
WHOLE = torch.arange(B * S * H, dtype=torch.float64).view(B, S, H)


def grid_of(parts: list[torch.Tensor], *, data: int = 1, tensor: int = 1) -> Grid:
    return Grid({"data": data, "tensor": tensor}, parts)


def activation(parts: list[torch.Tensor], like: torch.Tensor, *, is_gradient: bool = False, **axes: int) -> Assembled:
    return assemble_activation(grid_of(parts, **axes), like, is_gradient=is_gradient)


def assert_close(assembled: Assembled, expected: torch.Tensor) -> None:
    torch.testing.assert_close(assembled.whole, expected, rtol=1e-14, atol=0.0)


def cut(data: int, tensor: int, tensor_dim: int | None) -> list[torch.Tensor]:
    """By data ranks along the batch, by tensor ranks along a dimension or not at all."""
    rows = WHOLE.chunk(data)
    return [part for row in rows for part in ([row] * tensor if tensor_dim is None else row.chunk(tensor, tensor_dim))]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("tensor_dim", [None, 1, 2])
def test_activation_comes_together_however_it_is_cut(data, tensor, tensor_dim):
    assembled = activation(cut(data, tensor, tensor_dim), WHOLE, data=data, tensor=tensor)
    assert torch.equal(assembled.whole, WHOLE)
    assert assembled.copies_differ == []


def test_of_two_arrangements_that_fit_the_shape_the_right_one_is_taken():
    square = torch.arange(16.0).view(4, 4)
    parts = [part for row in square.chunk(2) for part in row.chunk(2, 1)]
    assert torch.equal(activation(parts, square, data=2, tensor=2).whole, square)


def test_shapes_that_do_not_add_up_have_no_arrangement():
    assert activation([WHOLE, WHOLE[:, :3]], WHOLE, tensor=2) is None
    assert activation([WHOLE[:, :2], WHOLE[:, :2]], WHOLE, tensor=2) is None


def test_copies_that_differ_in_one_bit_are_told_with_their_ranks():
    other = WHOLE.clone()
    other[1, 2, 3] = torch.nextafter(other[1, 2, 3], torch.tensor(torch.inf, dtype=torch.float64))
    assert activation([WHOLE, other], WHOLE, tensor=2).copies_differ == [(0, 1)]


def test_what_data_ranks_share_has_its_gradient_summed():
    shared = torch.randn(S, H).double()
    assert_close(activation([0.25 * shared, 0.75 * shared], shared, is_gradient=True, data=2), shared)


def test_padding_of_the_vocabulary_is_left_out_and_must_be_zero():
    like = torch.cat([WHOLE[0], torch.zeros(2, H, dtype=torch.float64)])  # the uncut one is padded too, to 8 rows
    padded = torch.cat([WHOLE[0], torch.zeros(6, H, dtype=torch.float64)])
    assert torch.equal(assemble_parameter(grid_of(list(padded.chunk(4)), tensor=4), {"tensor": 0}, like).whole, like)
    padded[-1, 0] = 1e-9
    assert not assemble_parameter(grid_of(list(padded.chunk(4)), tensor=4), {"tensor": 0}, like).whole.isfinite().all()


@pytest.mark.parametrize("dim", [0, 1])
def test_parameter_comes_together_by_its_own_word(dim):
    matrix = WHOLE[0]
    parts, cuts = [*matrix.chunk(2, dim), *matrix.chunk(2, dim)], {"tensor": dim}
    assert torch.equal(assemble_parameter(grid_of(parts, data=2, tensor=2), cuts, matrix).whole, matrix)
    parts[2] = parts[2] + 1
    assert assemble_parameter(grid_of(parts, data=2, tensor=2), cuts, matrix).copies_differ == [(0, 2)]


def test_experts_come_together_over_their_own_axes():
    experts = torch.randn(4, 3, 6).double()
    parts = [half for own in experts.chunk(2) for half in own.chunk(2, 2)] * 2
    grid = Grid({"expert_data": 2, "expert": 2, "tensor": 2}, parts)
    assert torch.equal(assemble_parameter(grid, {"expert": 0, "tensor": 2}, experts).whole, experts)
    parts[4] = parts[4] + 1
    assert assemble_parameter(Grid(grid.axes, parts), {"expert": 0, "tensor": 2}, experts).copies_differ == [(0, 4)]


@pytest.mark.parametrize("axes", [{"data": 2, "context": 3, "tensor": 2}, {"data": 1, "context": 3, "tensor": 4}])
def test_a_further_axis_of_tokens_comes_together_too(axes):
    rows = WHOLE.chunk(axes["data"])
    sequences = [part for row in rows for part in split_zigzag(row, axes["context"], 1)]
    parts = [part for sequence in sequences for part in sequence.chunk(axes["tensor"], 2)]
    assert torch.equal(assemble_activation(Grid(axes, parts), WHOLE, is_gradient=False).whole, WHOLE)


def test_what_ranks_of_several_axes_share_has_its_gradient_summed_over_all_of_them():
    shared = torch.randn(H).double()
    parts = [share * shared for share in (0.125, 0.125, 0.25, 0.5)]
    grid = Grid({"data": 2, "context": 2, "tensor": 1}, parts)
    assert_close(assemble_activation(grid, shared, is_gradient=True), shared)


def test_parts_of_one_rank_along_an_axis_are_found_by_its_role():
    grid = Grid({"data": 2, "context": 2, "tensor": 3}, [torch.tensor(rank) for rank in range(12)])
    assert [int(part) for part in grid.line(AxisRole.CUTS)] == [0, 1, 2]
    assert [int(part) for part in grid.line(AxisRole.TOKENS)] == [0, 3, 6, 9]


def test_a_piece_that_adjacent_tensor_ranks_hold_has_its_gradient_summed():
    parts = [share * piece for piece in WHOLE.chunk(2, 2) for share in (0.25, 0.75)]
    assert_close(activation(parts, WHOLE, is_gradient=True, tensor=4), WHOLE)


def test_parts_are_put_in_their_places_and_must_agree_where_they_overlap() -> None:
    whole = torch.arange(5.0)
    places = [(slice(0, 3),), ([2, 4, 3],)]
    parts = [whole[place].clone() for place in places]
    found = assemble_places(parts, places, whole)
    assert found is not None
    assert torch.equal(found.whole, whole)
    assert found.copies_differ == []
    parts[1][0] += 0.5
    found = assemble_places(parts, places, whole)
    assert found is not None
    assert (found.copies_differ, found.spread) == ([(0, 1)], 0.5)


@pytest.mark.parametrize("place", [(slice(0, 2),), ([3, 3],), ([7],), (0, 0)])
def test_parts_that_leave_gaps_or_do_not_fit_are_no_tensor(place) -> None:
    assert assemble_places([torch.zeros(3), torch.zeros(2)], [(slice(0, 3),), place], torch.zeros(5)) is None


def test_uneven_parts_of_an_activation_are_joined() -> None:
    whole = torch.arange(14.0).reshape(2, 7)
    grid = Grid({"data": 1, "tensor": 2}, [whole[:, :4], whole[:, 4:]])
    found = assemble_activation(grid, whole, is_gradient=False)
    assert found is not None
    assert torch.equal(found.whole, whole)
    other = Grid({"data": 1, "tensor": 2}, [whole[:, :4], whole[:, 5:]])
    assert assemble_activation(other, whole, is_gradient=False) is None


def test_columns_come_together_in_their_places_and_shared_ones_are_copies_or_summands() -> None:
    whole = torch.arange(10.0).reshape(2, 5)
    columns = [[0, 3, 4], [2, 1, 4]]
    parts = [whole[:, held].clone() for held in columns]
    copies = assemble_columns(parts, columns, whole, is_gradient=False)
    assert copies is not None
    assert torch.equal(copies.whole, whole)
    assert copies.copies_differ == []
    for part in parts:
        part[:, 2] /= 2
    summands = assemble_columns(parts, columns, whole, is_gradient=True)
    assert summands is not None
    assert torch.equal(summands.whole, whole)
    assert assemble_columns(parts, [[0, 3, 4], [2, 3, 4]], whole, is_gradient=True) is None
    assert assemble_columns([parts[0], parts[1][:, :2]], columns, whole, is_gradient=True) is None


def test_inside_a_module_some_columns_may_be_copies_and_others_summands() -> None:
    whole = torch.arange(1.0, 9.0).reshape(2, 4)
    parts = [torch.cat([whole[:, :2], whole[:, 2:] * share], 1) for share in (0.25, 0.75)]
    grid = Grid({"data": 1, "tensor": 2}, parts)
    found = assemble_activation(grid, whole, is_gradient=True, is_inside=True)
    assert found is not None
    assert torch.equal(found.whole, whole)
    outside = assemble_activation(grid, whole, is_gradient=True)
    assert outside is not None
    assert outside.copies_differ == [(0, 1)]
