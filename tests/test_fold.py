"""Folding: the same function, saved and loaded like any other model, or refused with the model as it was."""

import copy

import pytest
import torch
from families import FAMILIES, batches, make
from test_families import convert, output_of
from transformers import AutoModelForMaskedLM

from hf_primal import PrimalSettings

PLAIN = ("Bert", "Roberta", "DistilBert", "Albert", "CLIPText", "Bart", "ViT", "DeiT", "Wav2Vec2")
VALUES_ALONE = ("OPT", "T5")  # q is scaled on its way, or given a bias that no projection knows


def converted(family, window):
    settings = PrimalSettings(rank=2, features=8, window=window)
    return convert(make(family), family, settings, refine_steps=0)[0]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("family", [family for family in PLAIN + VALUES_ALONE if family in FAMILIES])
def test_a_folded_model_gives_the_same_with_fewer_parameters(family, window):
    model, batch = converted(family, window), batches(family)[0]
    expected, parameters = output_of(model, family, batch), model.num_parameters()
    assert model.train().fold() is model and model.training
    torch.testing.assert_close(output_of(model.eval(), family, batch), expected, atol=1e-4, rtol=1e-4)
    assert model.num_parameters() < parameters
    folded = {"value"} if window or family in VALUES_ALONE else {"query", "key", "value"}
    assert set(model.config.primal_folded) == folded


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in ("ModernBert", "GPT2", "Llama", "Qwen3")])
def test_what_cannot_be_folded_is_refused_and_left_alone(family):
    model = converted(family, 0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"cannot be folded: .*; use it as it is"):
        model.fold()
    assert model.config.primal_folded is None
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_any_number_of_features_that_fills_heads_folds():
    model = convert(make("Bert"), "Bert", PrimalSettings(rank=2, features=7, window=0), refine_steps=0)[0]
    expected = output_of(model, "Bert", batches("Bert")[0])
    assert set(model.fold().config.primal_folded) == {"query", "key", "value"}
    torch.testing.assert_close(output_of(model, "Bert", batches("Bert")[0]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 4])
def test_a_folded_model_is_saved_and_loaded_and_not_folded_again(window, tmp_path):
    model = converted("Bert", window).fold()
    model.save_pretrained(tmp_path)
    loaded, told = AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = batches("Bert")[0]
    assert torch.equal(output_of(loaded, "Bert", batch), output_of(model, "Bert", batch))
    with pytest.raises(ValueError, match="is folded already; fold a converted model once"):
        loaded.fold()


def test_padding_changes_nothing_in_a_folded_model_and_it_trains():
    model, batch = converted("Bert", 0).fold().train(), batches("Bert")[0]
    outputs = []
    for filler in (5, 7):
        ids = torch.where(batch["attention_mask"].bool(), batch["input_ids"], filler)
        outputs.append(model(**{**batch, "input_ids": ids}, labels=batch["input_ids"]))
    torch.testing.assert_close(
        *(output.logits[batch["attention_mask"].bool()] for output in outputs), atol=1e-5, rtol=1e-5
    )
    outputs[0].loss.backward()
    assert model.last_losses["loss_ksvd"].isfinite()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters() if x.requires_grad)
