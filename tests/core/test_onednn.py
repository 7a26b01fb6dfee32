"""common/onednn.py: oneDNN's products are torch's to round-off, where it is taken and where it is not."""

from common import onednn

import pytest
import torch

pytestmark = pytest.mark.fast


@pytest.fixture(params=[True, False], ids=["large", "small"])
def size(request, monkeypatch):
    """Above and below the least number of multiplications."""
    monkeypatch.setattr(onednn, "LEAST", 1000 if request.param else 2**40)
    return request.param


def matrices(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=g).to(dtype) for shape in ((20, 30), (30, 40), (40,))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_are_those_of_fp64(size, dtype):
    a, b, bias = matrices(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    exact = a.double() @ b.double()
    for name, got in (
        ("mm", onednn.mm(a, b)),
        ("transposed", onednn.mm(a.t().contiguous().t(), b.t().contiguous().t())),
        ("addmm", onednn.addmm(bias, a, b) - bias),
        ("scaled", (onednn.addmm(bias, a, b, beta=0.5, alpha=2) - 0.5 * bias) / 2),
        ("matrix", onednn.addmm(a @ b, a, b) - a @ b),
    ):
        assert got.dtype == dtype and got.shape == (20, 40), name
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=tolerance, msg=name)


def test_empty_products(size):
    a, b, _ = matrices()
    assert onednn.mm(a[:0], b).shape == (0, 40)
    assert torch.equal(onednn.mm(a[:, :0], b[:0]), torch.zeros(20, 40))


@pytest.mark.skipif(not onednn.is_amd(), reason="torch's own matmul is as fast on this CPU")
def test_a_linear_layer_takes_it_with_gradient_and_without_to_the_bit(monkeypatch):
    calls = []
    takes = onednn.takes_onednn
    monkeypatch.setattr(onednn, "LEAST", 1)
    monkeypatch.setattr(onednn, "takes_onednn", lambda a, b: calls.append(takes(a, b)) or takes(a, b))
    torch.manual_seed(0)
    layer = torch.nn.Linear(30, 40)
    x = torch.randn(4, 5, 30, requires_grad=True)
    y = layer(x)
    (y**2).sum().backward()
    assert calls == [True, True, True]  # forward, and two backward
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    expected = 2 * y.detach().flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-5, atol=1e-4)
