"""The layer: against a dense reference, under chunking, padding and half precision."""

import functools
import itertools

import pytest
import torch

from hf_primal import PrimalAttention, PrimalSettings
from hf_primal.modeling import primal_attention, primal_band
from hf_primal.modeling.primal_attention import sample_positions
from hf_primal.modeling.primal_interface import key_padding

FORMS = {
    "default": PrimalSettings(rank=3, features=6, window=4),
    "no band": PrimalSettings(rank=3, features=6, window=0),
    "signed values": PrimalSettings(rank=3, features=6, nonnegative=False),
    "landmark scores": PrimalSettings(rank=3, features=6, readout="scores"),
    "cosine scores": PrimalSettings(rank=3, feature_map="cosine", readout="scores"),
    "cosine values": PrimalSettings(rank=3, feature_map="cosine"),
    "paper": PrimalSettings.paper(rank=3, rank_multi=4),
    "paper, shared": PrimalSettings.paper(rank=3, rank_multi=4, shared_out_map=True),
}

CAUSAL_FORMS = [name for name, settings in FORMS.items() if settings.weights == "fixed"] + ["paper, causal"]
FORMS["paper, causal"] = PrimalSettings.paper(causal=True, rank=3)


def make_layer(settings, heads=2, head_dim=8, dtype=torch.float32):
    torch.manual_seed(0)
    layer = PrimalAttention(heads, head_dim, settings)
    for name, value in layer.initial_values().items():
        layer.state_dict()[name].copy_(value)
    return layer.to(dtype)


def make_inputs(batch=3, tokens=37, heads=2, head_dim=8, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, head_dim, generator=generator).to(dtype) for _ in range(3)]


def dense_context(layer, q, k, v, valid, causal=False, horizon=None, bias=None):
    """The band and the far kernel as one N x N matrix, straight from the formulas."""
    q = q * q.shape[-1] ** -0.5
    landmark_logits = q @ layer.key_landmarks.mT
    psi_q, log_sum = landmark_logits.softmax(-1), landmark_logits.logsumexp(-1, keepdim=True)
    psi_k = (k @ layer.query_landmarks.mT - layer.shift).exp()
    far = (psi_q @ layer.We.abs()) @ (psi_k @ layer.Wr.abs()).mT
    position = torch.arange(q.shape[-2])
    offset = position[:, None] - position
    exact = q @ k.mT if bias is None else q @ k.mT + bias[:, len(position) - 1 - offset]
    kernel = torch.where(offset.abs() < layer.settings.window, (exact - log_sum).exp(), far) * valid[:, None, None, :]
    kernel = kernel * (offset >= (0 if causal else -99)) * (offset.abs() < (horizon or 99))
    return (kernel @ v) / kernel.sum(-1, keepdim=True)


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [0, 1, 4, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("horizon", [None, 1, 6, 60])
def test_linear_time_equals_the_dense_kernel_at_every_chunk_size(window, chunk, causal, horizon, monkeypatch):
    layer = make_layer(PrimalSettings(rank=3, features=6, window=window), dtype=torch.float64)
    layer.chunk_size = chunk
    monkeypatch.setattr(primal_band, "BLOCK", chunk)
    q, k, v = make_inputs(dtype=torch.float64)
    valid = torch.rand(3, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = None if horizon else torch.randn(2, 73, dtype=torch.float64)

    context, _ = layer.context_and_scores(q, k, v, valid, causal=causal, horizon=horizon, bias=bias)

    expected = dense_context(layer, q, k, v, valid, causal, horizon, bias)
    torch.testing.assert_close(context[valid[:, None].expand(-1, 2, -1)], expected[valid[:, None].expand(-1, 2, -1)])


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("heads, groups", [(6, 3), (4, 1)])
@pytest.mark.parametrize("form", ["default", "signed values"])
def test_heads_worked_on_at_once_or_in_parts_give_the_same(batch, heads, groups, form, monkeypatch):
    layer = make_layer(FORMS[form], heads=heads, dtype=torch.float64)
    q = make_inputs(batch, heads=heads, dtype=torch.float64)[0]
    _, k, v = make_inputs(batch, heads=groups, dtype=torch.float64)
    valid = torch.rand(batch, 37, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = None if form == "signed values" else torch.randn(heads, 73, dtype=torch.float64)
    outputs = []
    for part in (1, 80, 10**6):
        monkeypatch.setattr(primal_attention, "PART", part)
        state = {}
        first = layer(q, k, v, valid, causal=True, bias=bias, state=state)
        outputs.append(torch.cat((first, layer(q, k, v, valid, causal=True, bias=bias, state=state)), 1))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[2])


def test_a_dominant_neighbour_does_not_overflow():
    layer = make_layer(FORMS["default"])
    q, k, v = (x * 100 for x in make_inputs())
    assert layer(q, k, v).isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["right", "left", "interior", "batch of one"])
def test_what_stands_at_padding_changes_nothing(form, side):
    layer = make_layer(FORMS[form]).train()
    q, k, v = make_inputs(batch=1 if side == "batch of one" else 3)
    valid = torch.ones(len(q), 37, dtype=torch.bool)
    valid[-1, {"right": slice(30, None), "left": slice(0, 7)}.get(side, slice(10, 17))] = False
    hidden = ~valid[:, None, :, None]
    inputs = [[x.masked_fill(hidden, filler).requires_grad_() for x in (q, k, v)] for filler in (1.0, float("nan"))]

    outputs, objectives = [], []
    for tensors in inputs:
        outputs.append(layer(*tensors, valid))
        objectives.append(layer.last)
        (outputs[-1].square().sum() + objectives[-1]).backward()

    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(objectives[0], objectives[1])
    assert (outputs[0][~valid] == 0).all()
    for tensors in inputs:
        for tensor in tensors:
            gradient = 0 if tensor.grad is None else tensor.grad.masked_select(hidden)
            assert torch.equal(torch.as_tensor(gradient).count_nonzero(), torch.tensor(0))


def test_grouped_keys_are_those_of_their_queries():
    layer = make_layer(FORMS["default"], heads=4)
    q, (_, k, v) = make_inputs(heads=4)[0], make_inputs(heads=2)
    expected = layer(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(layer(q, k, v), expected)


@pytest.mark.parametrize("form", CAUSAL_FORMS)
@pytest.mark.parametrize("side", ["right", "left", "interior"])
def test_what_stands_at_padding_changes_nothing_in_causal_layers(form, side):
    layer, options = make_layer(FORMS[form]).train(), {"causal": True}
    valid = torch.ones(3, 37, dtype=torch.bool)
    valid[-1, {"right": slice(30, None), "left": slice(0, 7)}.get(side, slice(10, 17))] = False
    hidden = ~valid[:, None, :, None]
    outputs = []
    for filler in (1.0, float("nan")):
        tensors = [x.masked_fill(hidden, filler).requires_grad_() for x in make_inputs()]
        outputs.append(layer(*tensors, valid, **options))
        (outputs[-1].square().sum() + layer.last).backward()
        assert all(x.grad is None or not x.grad.masked_select(hidden).any() for x in tensors)
    torch.testing.assert_close(*outputs)
    if side != "interior":
        kept = [x[-1:, :, valid[-1]] for x in make_inputs()]
        torch.testing.assert_close(outputs[0][-1:, valid[-1]], layer(*kept, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", CAUSAL_FORMS)
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_later_token_changes_no_earlier_output(form, chunk):
    layer = make_layer(FORMS[form])
    layer.chunk_size = chunk
    tensors = make_inputs()
    changed = [torch.cat((x[:, :, :20], 3 * x[:, :, 20:].flip(2)), 2) for x in tensors]
    first, second = (layer(*x, causal=True) for x in (tensors, changed))
    torch.testing.assert_close(first[:, :20], second[:, :20], atol=1e-6, rtol=1e-6)
    assert (first[:, 20:] - second[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("form", CAUSAL_FORMS)
@pytest.mark.parametrize("pieces", [[37], [1] * 37, [5, 1, 1, 30], [20, 17]])
def test_piece_by_piece_with_a_state_equals_at_once(form, pieces):
    layer = make_layer(FORMS[form], dtype=torch.float64)
    tensors = make_inputs(dtype=torch.float64)
    valid = torch.ones(3, 37, dtype=torch.bool)
    valid[1, :9] = False
    horizons = [None, 3, 6, 20] if form == "default" else [None]
    for horizon in horizons:
        state, outputs, sizes = {}, [], set()
        for part in torch.arange(37).split(pieces):
            inputs = (*(x[:, :, part] for x in tensors), valid[:, part])
            outputs.append(layer(*inputs, causal=True, horizon=horizon, state=state))
            sizes.add(sum(x.untyped_storage().nbytes() for x in state.values()))
        expected = layer(*tensors, valid, causal=True, horizon=horizon)
        torch.testing.assert_close(torch.cat(outputs, 1), expected)
        assert len(sizes) == 1  # the same number of bytes at every length


def test_sampled_weights_and_signed_sliding_layers_are_refused():
    with pytest.raises(ValueError, match="a causal layer must not; use fixed"):
        make_layer(FORMS["paper"])(*make_inputs(), causal=True)
    for form in ("signed values", "cosine scores"):
        with pytest.raises(ValueError, match="sliding-window layer needs readout values"):
            make_layer(FORMS[form])(*make_inputs(), horizon=8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [0, 5])
def test_padding_on_either_side_equals_the_unpadded_run(form, left):
    layer = make_layer(FORMS[form])
    tensors = make_inputs(batch=1, tokens=30)
    padded = [torch.nn.functional.pad(x, (0, 0, left, 11 - left), value=3.0) for x in tensors]
    valid = torch.zeros(1, 41, dtype=torch.bool)
    valid[:, left : left + 30] = True
    torch.testing.assert_close(layer(*padded, valid)[:, left : left + 30], layer(*tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_does_not_depend_on_its_batch(form):
    layer = make_layer(FORMS[form])
    tensors = make_inputs()
    valid = torch.arange(37) < torch.tensor([[37], [20], [9]])
    together = layer(*tensors, valid)
    for i, length in enumerate((37, 20, 9)):
        alone = layer(*(x[i : i + 1, :, :length] for x in tensors))
        torch.testing.assert_close(together[i : i + 1, :length], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_and_close(form, dtype):
    layer, tensors = make_layer(FORMS[form]), make_inputs(tokens=200)
    output = layer.to(dtype)(*(x.to(dtype) for x in tensors))
    assert output.dtype == dtype
    reference = layer.float()(*(x.to(dtype).float() for x in tensors))
    torch.testing.assert_close(output.float(), reference, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_does_not_change_the_result(form):
    layer, tensors = make_layer(FORMS[form]), make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(*tensors)
    assert torch.equal(output, layer(*tensors))


def test_every_parameter_gets_a_gradient():
    for name, settings in FORMS.items():
        layer = make_layer(settings).train()
        (layer(*make_inputs()).square().sum() + layer.last).backward()
        for parameter_name, parameter in layer.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, (name, parameter_name)


def test_gradients_agree_with_finite_differences():
    layer = make_layer(FORMS["default"], dtype=torch.float64)
    layer.chunk_size = 4
    inputs = [x.requires_grad_() for x in make_inputs(batch=1, tokens=11, dtype=torch.float64)]
    for causal in (False, True):
        assert torch.autograd.gradcheck(functools.partial(layer, causal=causal), inputs)


@pytest.mark.parametrize("form", ["default", "paper"])
def test_the_compiled_layer_has_no_graph_break_and_the_same_result(form, fresh_compiler):
    layer, tensors = make_layer(FORMS[form]), make_inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), layer(*tensors))


def test_the_objective_is_only_kept_while_training_with_a_weight():
    layer = make_layer(FORMS["default"]).eval()
    layer(*make_inputs())
    assert layer.last is None
    silent = make_layer(PrimalSettings(rank=3, features=6, ksvd_weight=0)).train()
    silent(*make_inputs())
    assert silent.last is None


@pytest.mark.parametrize(("tokens", "slots"), [(50, 7), (7, 7), (5, 12), (1, 4), (3, 1)])
def test_sampling_takes_evenly_spaced_valid_tokens_each_once(tokens, slots):
    valid = torch.zeros(1, tokens + 6, dtype=torch.bool)
    valid[:, 2 : 2 + tokens] = True
    index, used = sample_positions(tokens + 6, slots, valid, valid.device)
    taken = index[used].tolist()
    assert len(taken) == len(set(taken)) == min(tokens, slots)
    assert taken == sorted(taken) and taken[0] == 2 and (slots == 1 or taken[-1] == tokens + 1)
    gaps = {b - a for a, b in itertools.pairwise(taken)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_key_padding_reads_every_kind_of_mask():
    keep = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    full = keep[:, None, None, :].expand(-1, 1, 6, -1)
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    additive = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    for mask in (keep, keep.long(), full, full[:, :, :1], additive):
        assert torch.equal(key_padding(mask, 6), keep)
    assert torch.equal(key_padding(full & near, 6, horizon=2), keep)
    assert torch.equal(key_padding(full[:, :, 4:], 2, start=4), keep[:, 4:])
    assert key_padding(None, 6) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 40}, "rank must be 1..32 (features), got 40"),
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"window": -1}, "window must be >= 0, got -1"),
        ({"ksvd_weight": -0.1}, "ksvd_weight must be >= 0, got -0.1"),
        ({"feature_map": "relu"}, "feature_map must be landmark or cosine, got 'relu'"),
        ({"feature_map": "cosine", "features": 8}, "features is for feature_map landmark"),
        ({"feature_map": "cosine", "nonnegative": True}, "nonnegative needs feature_map landmark"),
        ({"weights": "sampled"}, "weights sampled needs feature_map cosine"),
        ({"readout": "scores", "window": 8}, "window 8 needs readout values"),
        ({"official_sampling": True}, "official_sampling needs weights sampled"),
        ({"shared_out_map": True}, "shared_out_map needs readout scores"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        PrimalSettings(**changes)
    assert message in str(caught.value)


def test_a_rank_above_the_head_dim_is_refused_for_fixed_cosine_weights():
    with pytest.raises(ValueError, match=r"rank must be 1\.\.8 \(head dim\), got 9"):
        PrimalAttention(2, 8, PrimalSettings(rank=9, feature_map="cosine"))


@pytest.mark.parametrize("form", ["default", "no band", "signed values"])
@pytest.mark.parametrize("batch", [1, 4])
def test_training_in_parts_gives_the_same_gradients_and_objective(form, batch, monkeypatch):
    found = []
    for part in (1, 80, 10**6):
        monkeypatch.setattr(primal_attention, "PART", part)
        layer = make_layer(FORMS[form], heads=4, dtype=torch.float64).train()
        tensors = [x.requires_grad_() for x in make_inputs(batch, heads=4, dtype=torch.float64)]
        valid = torch.arange(37) < torch.tensor([[37], [20], [9], [37]])[:batch]
        output = layer(*tensors, valid)
        (output.square().sum() + layer.last).backward()
        found.append([output, layer.last, *(x.grad for x in tensors), *(x.grad for x in layer.parameters())])
    for one, two, whole in zip(*found, strict=True):
        torch.testing.assert_close(one, whole)
        torch.testing.assert_close(two, whole)
