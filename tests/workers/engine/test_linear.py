"""Packed and fused linear layers give bit for bit what nn.Linear gives."""

import pytest
import torch
from torch import nn

from workers.engine.linear import FusedPart, PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="this torch has no packed bf16 products"
)


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 64, bias=bias)
        self.k_proj = nn.Linear(48, 32, bias=bias)
        self.v_proj = nn.Linear(48, 32, bias=bias)
        self.o_proj = nn.Linear(64, 48, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q + torch.cat([k, v], -1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 64])
@torch.inference_mode()
def test_the_products_are_the_same(bias: bool, tokens: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(bias), Attention(bias)).bfloat16()
    x = torch.randn(1, tokens, 48).bfloat16()
    expected = model(x)
    pack_linears(model)
    assert isinstance(model[0].q_proj, FusedPart)
    assert isinstance(model[0].o_proj, PackedLinear)
    assert torch.equal(model(x), expected)


@torch.inference_mode()
def test_fused_parts_may_be_called_in_any_order_with_any_inputs() -> None:
    torch.manual_seed(0)
    model, plain = Attention(False).bfloat16(), Attention(False).bfloat16()
    plain.load_state_dict(model.state_dict())
    pack_linears(model)
    x, y = (torch.randn(1, 3, 48).bfloat16() for _ in range(2))
    calls = [("v_proj", x), ("q_proj", y), ("k_proj", y), ("k_proj", y), ("q_proj", x), ("v_proj", y), ("q_proj", x)]
    for name, given in calls:
        assert torch.equal(getattr(model, name)(given), getattr(plain, name)(given)), name


@torch.inference_mode()
def test_a_fused_product_is_computed_once_and_then_forgotten() -> None:
    model = Attention(False).bfloat16()
    pack_linears(model)
    part = model.q_proj
    assert isinstance(part, FusedPart)
    model(torch.randn(1, 3, 48).bfloat16())
    assert part._fused._input is None


def test_only_plain_linear_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(Special(4, 4), nn.Linear(4, 4)).bfloat16()
    pack_linears(model)
    assert type(model[0]) is Special
    assert model[1].weight.dtype == torch.bfloat16


def test_packing_is_for_bfloat16_on_the_cpu() -> None:
    assert not can_pack(torch.device("cpu"), torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
