"""Every family: nothing else moves, planted attention is recovered, it reloads, runs, ignores padding and trains."""

import copy
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from families import CAUSAL, FAMILIES, batches, loss_of, make

from hf_primal import PrimalAttention, PrimalSettings, convert_model
from hf_primal.convert.reload_check import digest
from hf_primal.modeling.modeling_primal import self_attention_modules
from hf_primal.observe import with_decoder_inputs

SETTINGS = PrimalSettings(rank=4, features=8, window=4)
TEXT = [family for family in FAMILIES if FAMILIES[family][3] == "text"]


@pytest.fixture(autouse=True, scope="module")
def latency_at_one_short_length():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_primal.report.LENGTHS", (32,))
        yield


def convert(teacher, family, settings=SETTINGS, **options):
    return convert_model(
        teacher,
        layers=FAMILIES[family][2],
        calibration=batches(family),
        settings=settings,
        **{"refine_steps": 2, **options},
    )


@functools.cache
def converted_of(family):
    """Teacher, converted model and report; for tests that change neither."""
    teacher = make(family)
    return teacher, *convert(teacher, family)


def output_of(model, family, batch):
    """The output that is compared."""
    with torch.no_grad():
        output = model(**with_decoder_inputs(model, batch))
    first = "last_hidden_state" if "last_hidden_state" in output and "logits" not in output else "logits"
    return output[first]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_outside_the_replaced_layers_moves(family):
    teacher, converted, report = converted_of(family)
    before, after = make(family).state_dict(), converted.state_dict()

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    added = {name for name in after if name not in before}
    assert added == {name for name in after if ".primal." in name} and added
    assert all(tensor.isfinite().all() for tensor in after.values() if tensor.is_floating_point())
    if teacher.get_output_embeddings() is not None and teacher.config.tie_word_embeddings:
        assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    assert [layer.index for layer in report.layers] == converted.config.primal_layers
    states = [
        model(**with_decoder_inputs(teacher, batches(family)[0]), output_hidden_states=True)
        for model in (teacher, converted)
    ]
    name = "hidden_states" if "hidden_states" in states[0] else "encoder_hidden_states"
    first = converted.config.primal_layers[0]
    assert torch.equal(states[0][name][first], states[1][name][first])
    assert not torch.equal(states[0][name][first + 1], states[1][name][first + 1])


def plant(teacher, family):
    """Make every query of a head alike: attention of rank 1, weighted by the keys alone (uniform under RoPE)."""
    rotary = family in ("ModernBert", "GPTNeoX", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi", "T5")
    names = ("query", "q_proj", "q_lin", "q", "c_attn", "query_key_value", "Wqkv")
    for _, module in self_attention_modules(teacher):
        name = next(name for name in names if hasattr(module, name))
        projection = getattr(module, name)
        for kind, parameter in projection.named_parameters():
            value = parameter.data.mT if name == "c_attn" and kind == "weight" else parameter.data
            if name == "query_key_value":
                value = value.view(8, 3, 8, -1)[:, 0]
            elif name in ("c_attn", "Wqkv"):
                value = value[: len(value) // 3]
            value.zero_()
            if kind == "bias" and not rotary:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
        if hasattr(module, "relative_attention_bias"):
            module.relative_attention_bias.weight.data.zero_()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_low_rank_attention_is_recovered(family, window):
    teacher = make(family)
    plant(teacher, family)
    _, report = convert(teacher, family, PrimalSettings(rank=2, features=4, window=window), refine_steps=0)
    assert all(layer.error_closed_form < 1e-6 for layer in report.layers)  # squared: 1e-3 of the output


@pytest.mark.parametrize("family", FAMILIES)
def test_sdpa_and_eager_give_the_same_and_attentions_are_those_of_the_kept_layers(family):
    _, converted, _ = converted_of(family)
    converted = copy.deepcopy(converted)
    batch = batches(family)[0]
    first = output_of(converted, family, batch)
    converted.set_attn_implementation("eager")
    shown = batch["attention_mask"].bool() if FAMILIES[family][3] == "text" else ...
    torch.testing.assert_close(output_of(converted, family, batch)[shown], first[shown], atol=1e-4, rtol=1e-4)
    output = converted(**with_decoder_inputs(converted, batch), output_attentions=True)
    found = [
        matrix
        for name in ("attentions", "encoder_attentions", "decoder_attentions")
        for matrix in output.get(name) or ()
    ]
    kept = len(self_attention_modules(converted)) - len(converted.config.primal_layers)
    assert len(found) == kept and all(matrix.ndim == 4 for matrix in found)


@pytest.mark.parametrize("side", ["right", "left", "interior", "batch of one"])
@pytest.mark.parametrize("family", [family for family in TEXT if family != "CLIPText"])  # it takes no embeddings
def test_what_stands_at_padding_changes_nothing(family, side):
    _, converted, _ = converted_of(family)
    converted = copy.deepcopy(converted).train()
    mask = torch.ones(1 if side == "batch of one" else 3, 30, dtype=torch.long)
    mask[0, {"right": slice(22, None), "interior": slice(9, 17)}.get(side, slice(0, 7))] = 0
    ids = batches(family, tokens=30)[0]["input_ids"][: len(mask)]
    embed = converted.get_input_embeddings()
    shown, gradients = [], []
    for fill in (5, 77):
        embeds = embed(ids.masked_fill(mask == 0, fill)).detach().requires_grad_()
        inputs = {"inputs_embeds": embeds, "attention_mask": mask}
        if family in ("T5", "Bart"):
            inputs |= {"decoder_input_ids": ids.masked_fill(mask == 0, fill), "decoder_attention_mask": mask}
        if family == "GPT2" and side == "left":
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        output = converted(**inputs)
        objective = sum(m.last for m in converted.modules() if isinstance(m, PrimalAttention) and m.last is not None)
        shown.append(output[0][mask.bool()])
        (shown[-1].square().sum() + objective).backward()
        gradients.append(embeds.grad)
    torch.testing.assert_close(*shown, atol=1e-4, rtol=1e-4)
    assert all((gradient[mask == 0] == 0).all() and gradient[mask == 1].abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("family", TEXT)
def test_a_sequence_does_not_depend_on_its_batch_nor_on_a_mask_of_ones(family):
    _, converted, _ = converted_of(family)
    batch = batches(family)[0]
    together = output_of(converted, family, batch)
    for row in range(2):
        length = int(batch["attention_mask"][row].sum())
        alone = {"input_ids": batch["input_ids"][row : row + 1, :length]}
        for inputs in (alone, alone | {"attention_mask": torch.ones(1, length, dtype=torch.long)}):
            found = output_of(converted, family, inputs)
            torch.testing.assert_close(found[0], together[row, :length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "Llama", "Mistral", "GPT2"])
def test_a_mask_of_four_dimensions_is_the_mask_of_two(family):
    _, converted, _ = converted_of(family)
    batch = batches(family)[0]
    keep = batch["attention_mask"].bool()[:, None, None, :]
    offset = torch.arange(36)[:, None] - torch.arange(36)
    if family != "Bert":
        keep = keep & (offset >= 0)
    if family == "Mistral":
        keep = keep & (offset < 9)
    keep = keep.expand(-1, 1, 36, -1)
    found = output_of(converted, family, {"input_ids": batch["input_ids"], "attention_mask": keep})
    valid = batch["attention_mask"].bool()
    torch.testing.assert_close(found[valid], output_of(converted, family, batch)[valid], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "Llama", "Mistral"])
def test_packed_sequences_are_refused_not_mixed(family):
    _, converted, _ = converted_of(family)
    part = torch.arange(36) // 12
    keep = (part[:, None] == part) & (torch.arange(36)[:, None] >= torch.arange(36))
    with pytest.raises(ValueError, match="keeps tokens of one row apart"):
        converted(input_ids=batches(family)[0]["input_ids"], attention_mask=keep.expand(4, 1, 36, 36))


@pytest.mark.parametrize("family", CAUSAL)
def test_a_later_token_changes_nothing_earlier(family):
    _, converted, _ = converted_of(family)
    ids = batches(family)[0]["input_ids"]
    changed = ids.clone()
    changed[:, 20:] = 7
    first, second = (output_of(converted, family, {"input_ids": x}) for x in (ids, changed))
    assert torch.equal(first[:, :20], second[:, :20]) and not torch.equal(first[:, 20:], second[:, 20:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss(family, dtype):
    converted, _ = convert(make(family, dtype), family) if dtype != torch.float32 else converted_of(family)[1:]
    converted, batch = copy.deepcopy(converted).train(), batches(family)[0]
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    optimizer = torch.optim.AdamW(converted.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = loss_of(converted, family, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite()) and losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("family", ["Bert", "Llama", "Mistral"])
def test_the_compiled_model_has_no_graph_break_and_the_same_loss(family, fresh_compiler):
    _, converted, _ = converted_of(family)
    converted, batch = copy.deepcopy(converted).train(), batches(family)[0]
    options = {"labels": batch["input_ids"]} | ({"use_cache": False} if family in CAUSAL else {})
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch, **options).loss, converted(**batch, **options).loss)


RELOAD = """
import json, sys
sys.modules["hf_primal"] = None
import torch, transformers
from pathlib import Path
exec(Path(sys.argv[2]).read_text().split('if __name__')[0])
for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    config = json.loads((folder / "config.json").read_text())
    outcome = {}
    for auto, code in config["auto_map"].items():
        if auto == "AutoConfig":
            continue
        model, info = getattr(transformers, auto).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        same = all(digest(t) == expected["digests"][n] for n, t in model.state_dict().items() if n in expected["digests"])
        state = "equal" if same else "different"
        if [key for key in info["missing_keys"] if ".primal." in key]:
            state = "primal missing"
        if type(model).__name__ == config["architectures"][0]:
            outputs = outputs_of(model, expected["inputs"])
            close = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(outputs, expected["outputs"], strict=True))
            state += ", own head " + ("equal" if close and not info["missing_keys"] else "different")
        outcome[auto] = state
    print(folder.name, json.dumps(outcome))
"""


def test_every_family_reloads_in_a_fresh_process_under_each_auto_class(tmp_path):
    from hf_primal.convert import reload_check

    for family in FAMILIES:
        _, converted, _ = converted_of(family)
        converted.save_pretrained(tmp_path / family)
        inputs = with_decoder_inputs(converted, batches(family)[0])
        saved = {"digests": {name: digest(t) for name, t in converted.state_dict().items()}, "inputs": inputs}
        saved["outputs"] = reload_check.outputs_of(converted, inputs)
        torch.save(saved, tmp_path / family / "expected.pt")
    child = subprocess.run(
        [sys.executable, "-c", RELOAD, str(tmp_path), reload_check.__file__],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found = {line.split(" ", 1)[0]: json.loads(line.split(" ", 1)[1]) for line in child.stdout.splitlines()}
    assert set(found) == set(FAMILIES)
    for family, outcome in found.items():
        assert all(state in ("equal", "equal, own head equal") for state in outcome.values()), (family, outcome)
        assert "equal, own head equal" in outcome.values(), (family, outcome)
