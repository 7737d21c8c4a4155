import pytest
import torch

from espnet_mega_bias.position_bias.toeplitz import toeplitz

SHAPES = [
    (1, 1),
    (1, 5),
    (4, 1),
    (5, 3),
    (3, 5),
    (33, 33),
    (65, 65),
    (67, 9),
    (150, 170),
]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_each_entry_is_the_value_of_its_diagonal(rows, columns):
    values = torch.randn(2, 3, rows + columns - 1)

    matrix = toeplitz(values, rows)

    assert matrix.shape == (2, 3, rows, columns)

    for i in range(rows):
        row = values[..., rows - 1 - i : rows - 1 - i + columns]
        assert torch.equal(matrix[..., i, :], row)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_gradient_is_the_sum_along_each_diagonal(rows, columns):
    values = torch.randn(2, rows + columns - 1, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, rows, columns, dtype=torch.float64)

    toeplitz(values, rows).backward(cotangent)

    expected = torch.stack(
        [
            cotangent.diagonal(offset, 1, 2).sum(-1)
            for offset in range(1 - rows, columns)
        ],
        dim=-1,
    )
    torch.testing.assert_close(values.grad, expected, rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives_agree_with_finite_differences():
    values = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda v: toeplitz(v, 3), values)
    assert torch.autograd.gradgradcheck(lambda v: toeplitz(v, 3), values)


def test_bfloat16_gradient_is_summed_in_float32():
    values = torch.zeros(2 * 600 - 1, dtype=torch.bfloat16, requires_grad=True)

    # Summed in bfloat16, the main diagonal would stop growing at 256.
    toeplitz(values, 600).backward(torch.eye(600, dtype=torch.bfloat16))

    assert values.grad[599] == 600
