"""The attention of a GPU against a plain softmax, in every variant; with TRITON_INTERPRET=1 the kernel runs on the CPU."""

import pytest
import torch
from paged_world import Shape, World

from workers.engine.attention import Variant
from workers.engine.attention_cuda import VarlenLayer

pytest.importorskip("triton", reason="triton is not installed")
from workers.engine.attention_triton import TritonLayer, largest, store

QUERY_HEADS = 6
LENGTHS = [40, 37, 20, 33, 3, 600]
STEPS = (
    [30, 17, 0, 1, 2, 563],  # first chunks
    [7, 17, 16, 30, 0, 20],  # later ones
    [1, 1, 1, 1, 1, 1],  # decodes, one of them over two splits
    [1, 1, 3, 1, 0, 15],  # single tokens and short slices in one step
)
VARIANTS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 520, "softcap": 2.0, "sinks": True},
}
SHAPES = {"odd": Shape(2, 3, 24, 10), "wide": Shape(1, 8, 128, 128), "single": Shape(4, 1, 192, 128)}


def variant_named(name: str, heads: int, device: torch.device) -> Variant:
    fields = dict(VARIANTS[name])
    if fields.get("sinks"):
        fields["sinks"] = torch.linspace(-2, 2, heads, device=device)  # type: ignore[assignment]
    return Variant(0.3, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_kernel_equals_plain_attention(name: str, device: torch.device) -> None:
    world = World(TritonLayer, SHAPES["odd"], LENGTHS, variant_named(name, QUERY_HEADS, device), device)
    for counts in STEPS:
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert world.touched() == world.owned()


@pytest.mark.parametrize("shape", ["wide", "single"])
def test_heads_of_other_sizes(shape: str, device: torch.device) -> None:
    heads = SHAPES[shape].heads * SHAPES[shape].sharing
    world = World(TritonLayer, SHAPES[shape], [40, 5], variant_named("sinks", heads, device), device)
    for counts in ([30, 4], [9, 0], [1, 1]):
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_kernel_in_float16(device: torch.device) -> None:
    """Not bfloat16: the interpreter multiplies its bits."""
    world = World(TritonLayer, SHAPES["odd"], [40, 5], variant_named("all", QUERY_HEADS, device), device, torch.float16)
    for counts in ([30, 4], [9, 0], [1, 1]):
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_in_16_bits(name: str, shape: str, dtype: torch.dtype, gpu: torch.device) -> None:
    heads = SHAPES[shape].heads * SHAPES[shape].sharing
    world = World(TritonLayer, SHAPES[shape], [*LENGTHS[:5], 5000], variant_named(name, heads, gpu), gpu, dtype)
    for counts in ([30, 17, 0, 1, 2, 4900], *STEPS[1:]):
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert world.touched() == world.owned()


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("shape", [Shape(2, 3, 64, 64), Shape(2, 4, 128, 128)], ids=["64", "128"])
def test_torchs_own_attention_over_gathered_keys(window: int | None, shape: Shape, gpu: torch.device) -> None:
    variant = Variant(0.3, window=window)

    def varlen(current, cache, tiling) -> VarlenLayer:  # type: ignore[no-untyped-def]
        return VarlenLayer(current, cache)

    world = World(varlen, shape, LENGTHS, variant, gpu, torch.bfloat16)  # type: ignore[arg-type]
    for counts in STEPS:
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_a_cache_of_8_bits_is_read_as_it_was_written(kv_dtype: torch.dtype, device: torch.device) -> None:
    shape = SHAPES["odd"]
    world = World(
        TritonLayer, shape, [40, 5, 530], variant_named("all", QUERY_HEADS, device), device, kv_dtype=kv_dtype
    )
    world.step([30, 4, 510])
    got, _ = world.step([9, 0, 19])
    cache = world.cache
    assert cache.key_scales is not None
    assert cache.value_scales is not None
    again = World(TritonLayer, shape, [40, 5, 530], world.variant, device)
    again.cache.keys.copy_(cache.keys.float() * cache.key_scales.unsqueeze(2))
    again.cache.values.copy_(cache.values.float() * cache.value_scales.unsqueeze(2))
    for sequence, computed in zip(again.sequences, (30, 4, 510), strict=True):
        sequence.computed = computed
        for position in range(computed, len(sequence.tokens)):
            slot = sequence.blocks[position // 16] * 16 + position % 16
            sequence_index = again.sequences.index(sequence)
            again.tensors[sequence_index][1][:, position] = again.cache.keys[slot]
            again.tensors[sequence_index][2][:, position] = again.cache.values[slot]
    expected, _ = again.step([9, 0, 19])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def written(kv_dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys as given [heads, tokens, D], keys as stored, their scales [heads, tokens])"""
    world = World(
        TritonLayer, SHAPES["odd"], [64], variant_named("plain", QUERY_HEADS, device), device, kv_dtype=kv_dtype
    )
    k, v = torch.randn(2, 64, 24, device=device), torch.randn(2, 64, 10, device=device)
    k[0, 3] = 0
    store(k, v, torch.arange(64, device=device), world.cache)
    assert world.cache.key_scales is not None
    return k, world.cache.keys[:64].transpose(0, 1), world.cache.key_scales[:64].T


def test_int8_is_rounded_to_the_nearest(device: torch.device) -> None:
    k, stored, scales = written(torch.int8, device)
    assert ((stored.float() * scales.unsqueeze(2) - k).abs() <= scales.unsqueeze(2) * 0.5001).all()
    assert stored[0, 3].eq(0).all()


def test_fp8_is_rounded_as_torch_rounds_it(gpu: torch.device) -> None:
    """Not in the interpreter, whose rounding does not carry into the exponent."""
    k, stored, scales = written(torch.float8_e4m3fn, gpu)
    torch.testing.assert_close(scales, (k.abs().amax(2) / largest(torch.float8_e4m3fn)).clamp(min=1e-12))
    expected = (k / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    assert (stored.float() == expected.float()).float().mean() > 0.999


def test_a_bucket_computes_the_same_and_writes_nowhere_else(device: torch.device) -> None:
    world = World(TritonLayer, SHAPES["odd"], [20, 530, 9], variant_named("sinks", QUERY_HEADS, device), device)
    world.step([19, 529, 8])
    got, expected = world.step([1, 1, 1], bucket=4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert world.touched() - {world.packer.idle_block * 16} == world.owned()


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bit for bit: where a sequence is split is its own affair."""
    variant = variant_named("sinks", QUERY_HEADS, device)
    together = World(TritonLayer, SHAPES["odd"], [530, 40, 9], variant, device)
    together.step([529, 39, 8])
    batched, _ = together.step([1, 1, 1])
    alone = World(TritonLayer, SHAPES["odd"], [530], variant, device)
    alone.step([529])
    single, _ = alone.step([1])
    assert torch.equal(batched[:1], single)
