"""The fused kernels against the torch form of the band; on a CPU they run in Triton's interpreter (see conftest)."""

import pytest
import torch

from hf_primal import PrimalAttention, PrimalSettings
from hf_primal.modeling import primal_triton
from hf_primal.modeling.primal_band import banded

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("q", "k", "v", "e", "r", "log_sum", "past")
CASES = {
    "one token": {"tokens": 1},
    "one chunk": {"tokens": 9, "window": 40},
    "several chunks": {"tokens": 70},
    "window of one": {"tokens": 37, "window": 1},
    "wide window": {"tokens": 70, "window": 40},
    "causal": {"tokens": 70, "causal": True},
    "causal, window of one": {"tokens": 37, "window": 1, "causal": True},
    "causal, wide window": {"tokens": 37, "window": 40, "causal": True},
    "padding on the right": {"tokens": 50, "padding": "right"},
    "padding on the left": {"tokens": 50, "padding": "left", "causal": True},
    "holes, and a row of padding": {"tokens": 37, "padding": "holes"},
    "grouped keys": {"tokens": 37, "groups": 2},
    "grouped keys, causal, padded": {"tokens": 37, "groups": 2, "causal": True, "padding": "left"},
    "earlier keys and sums of a cache": {"tokens": 37, "earlier": 5, "past": True, "causal": True},
    "one token after a cache": {"tokens": 1, "earlier": 5, "past": True, "causal": True},
    "odd sizes": {"tokens": 37, "dim": 24, "rank": 3},
    "large logits": {"tokens": 37, "scale": 50.0},
}


def make_inputs(tokens, groups=4, earlier=0, past=False, padding=None, dim=8, rank=16, scale=1.0, heads=4, **_):
    """What `banded` takes, float32: queries, keys, values, factors, log-sums, sums of a cache; which keys are tokens."""
    generator = torch.Generator().manual_seed(0)
    keys = tokens + earlier
    shapes = {
        "q": (3, heads, tokens, dim),
        "k": (3, groups, keys, dim),
        "v": (3, groups, keys, dim),
        "e": (3, heads, tokens, rank),
        "r": (3, heads, keys, rank),
        "log_sum": (3, heads, tokens, 1),
        "past": (3, heads, rank, dim + 1),
    }
    made = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    made["q"] *= scale
    made = {name: x.abs() if name in ("e", "r", "past") else x for name, x in made.items()}
    if not past:
        del made["past"]
    seen = None
    if padding:
        place, length = torch.arange(keys), torch.tensor([[keys], [keys // 2], [3]])
        seen = place < length if padding == "right" else place >= keys - length
        if padding == "holes":
            seen = torch.rand(3, keys, generator=generator) > 0.3
            seen[2] = False
        for name in ("k", "v", "r"):
            made[name] = made[name].masked_fill(~seen[:, None, :, None], 0.0)
    return made, seen


def answer(attend, made, device, dtype=torch.float32):
    """Rows as the layer reads them, and their gradients with respect to everything that has one."""
    moved = {name: x.to(device, dtype, copy=True).requires_grad_() for name, x in made.items()}
    total, mass = attend(**moved)
    output = total.float() / mass.float().clamp(min=1e-30)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (output * weight).sum().backward()
    return {"output": output.detach().cpu()} | {name: x.grad.float().cpu() for name, x in moved.items()}


def assert_alike(case, dtype=torch.float32, bias=None, **tolerance):
    made, seen = make_inputs(**case)
    window, causal = case.get("window", 5), case.get("causal", False)
    expected = answer(
        lambda **inputs: banded(**inputs, window=window, chunk=8, causal=causal, seen=seen, bias=bias), made, "cpu"
    )
    there = {"seen": None if seen is None else seen.to(DEVICE), "bias": None if bias is None else bias.to(DEVICE)}
    found = answer(
        lambda **inputs: primal_triton.fused(**inputs, window=window, causal=causal, chunk=16, **there),
        made,
        DEVICE,
        dtype,
    )
    for name, value in expected.items():
        size = float(value.abs().max().clamp(min=1.0))  # some gradients are rounding alone
        torch.testing.assert_close(
            found[name] / size, value / size, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_the_torch_form_in_outputs_and_gradients(case):
    assert_alike(CASES[case], rtol=1e-4, atol=2e-5)


def test_a_position_bias_is_added_in_the_band():
    bias = torch.randn(4, 2 * 40 - 1, generator=torch.Generator().manual_seed(2))
    assert_alike({"tokens": 37}, bias=bias, rtol=1e-4, atol=2e-5)


def test_half_precision_stays_near_float32():
    assert_alike({"tokens": 70}, dtype=torch.bfloat16, rtol=0.05, atol=0.03)


def test_the_chunk_changes_nothing():
    made, _ = make_inputs(tokens=70)
    found = [
        answer(lambda chunk=chunk, **inputs: primal_triton.fused(**inputs, window=5, chunk=chunk), made, DEVICE)
        for chunk in (16, 32, 64)
    ]
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-4)


def test_tensors_that_the_kernels_do_not_take_are_told():
    q, e = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4)
    assert not primal_triton.usable(q, q, e, window=4, bias=None)  # on a CPU
    assert not primal_triton.usable(q.to(DEVICE), q, e, window=0, bias=None)
    assert not primal_triton.usable(q.to(DEVICE).double(), q, e, window=4, bias=None)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_on_a_gpu_equals_the_layer_on_a_cpu(causal):
    torch.manual_seed(0)
    layer = PrimalAttention(4, 64, PrimalSettings())
    layer.load_state_dict(layer.initial_values())
    q, k, v = torch.randn(3, 2, 4, 300, 64)
    expected = layer(q, k, v, causal=causal)
    found = layer.to("cuda")(q.cuda(), k.cuda(), v.cuda(), causal=causal)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
