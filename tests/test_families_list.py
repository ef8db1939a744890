"""The list of model families: what can be converted is read off the installed Transformers, without importing it."""

import sys

import pytest

from hf_primal.convert.families import list_families

SUPPORTED = [
    "albert", "bart", "bert", "camembert", "clip_text_model", "decision_transformer", "deit", "distilbert", "electra",
    "gemma", "gpt2", "gpt_neox", "llama", "mistral", "modernbert", "opt", "phi", "qwen2",
    "qwen3", "roberta", "t5", "vit", "wav2vec2", "whisper", "xlm-roberta",
]  # fmt: skip
UNSUPPORTED = {
    "deberta": "no attention layers are recorded",
    "deberta-v2": "no attention layers are recorded",
    "longformer": "no attention layers are recorded",
    "mpnet": "no attention layers are recorded",
    "bloom": "no attention layers are recorded",
    "big_bird": "does not go through the attention interface",
    "wavlm": "does not go through the attention interface",
    "mamba": "it has no attention layers",
    "fnet": "it has no attention layers",
}
KINDS = {
    "bert": "encoder", "gpt2": "decoder", "t5": "encoder-decoder", "vit": "vision", "wav2vec2": "speech",
    "whisper": "speech", "clip": "multimodal", "decision_transformer": "decoder", "clip_text_model": "encoder",
}  # fmt: skip


@pytest.fixture(scope="module")
def families():
    return {family.model_type: family for family in list_families()}


def test_nothing_is_imported():
    before = set(sys.modules)
    list_families()
    assert not [name for name in set(sys.modules) - before if ".modeling_" in name]


def test_families_are_sorted_and_unique():
    names = [family.model_type for family in list_families()]
    assert names == sorted(set(names)) and len(names) > 300


@pytest.mark.parametrize("name", SUPPORTED)
def test_families_whose_attention_is_routed_are_supported(families, name):
    assert families[name].supported, families[name].reason


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_families_say_why_not(families, name):
    assert not families[name].supported and UNSUPPORTED[name] in families[name].reason


def test_a_reason_is_given_exactly_if_a_family_is_not_supported(families):
    assert all(family.supported != bool(family.reason) for family in families.values())


def test_models_made_of_others_are_judged_by_their_parts(families):
    assert families["llava"].supported  # CLIP and Llama
    assert not families["deepseek_vl_hybrid"].supported  # SAM, SigLIP and Llama


def test_a_family_without_a_modeling_file_is_that_of_its_base_model(families):
    assert families["gpt-sw3"].supported == families["gpt2"].supported


def test_kinds(families):
    assert {name: families[name].kind for name in KINDS} == KINDS
