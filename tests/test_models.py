"""Converted models: nothing else moves, they save, reload in a fresh process, and train."""

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from conftest import bert_config, random_batches

from hf_primal import PrimalAttention, PrimalSettings, convert_model
from hf_primal.convert.verify import verify_reload
from hf_primal.layers import choose_layers, parse_layers
from hf_primal.modeling import configuration_primal, modeling_primal
from hf_primal.modeling.primal_versions import OLDEST_TRANSFORMERS, check_transformers
from hf_primal.observe import Replay
from hf_primal.surgery import build_converted

SETTINGS = PrimalSettings(rank=4, features=8, window=4)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 101,
}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def make(head="Model", dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, initializer_range=0.2)
    return getattr(transformers, f"Bert{head}")(config).eval().to(dtype)


def convert(model, settings=SETTINGS, layers="last2", **options):
    return convert_model(
        model, layers=layers, calibration=random_batches(), settings=settings, **{"refine_steps": 2, **options}
    )


def test_tied_weights_stay_tied_and_are_not_shared_with_the_teacher():
    teacher = make(head="ForMaskedLM")
    converted, _ = convert(teacher)
    assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    with torch.no_grad():
        converted.get_input_embeddings().weight.zero_()
    assert teacher.get_input_embeddings().weight.abs().sum() > 0


def test_the_teacher_is_left_as_it_was_found_even_after_an_error(monkeypatch):
    teacher = make().train()
    configs = [module.config for _, module in choose_layers(teacher, "all").values()]
    with pytest.raises(ValueError, match="shorter than the window"):
        convert(teacher, PrimalSettings(rank=4, features=8, window=100))
    assert teacher.training
    assert all(
        module.config is config
        for config, (_, module) in zip(configs, choose_layers(teacher, "all").values(), strict=True)
    )
    assert all("_observer" not in vars(module) for module in teacher.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_does_not_matter_in_the_whole_model(implementation):
    teacher = make()
    teacher.set_attn_implementation(implementation)
    converted, _ = convert(teacher)
    converted.set_attn_implementation(implementation)
    ids = random_batches()[0]["input_ids"][:1, :20]
    with torch.no_grad():
        plain = converted(input_ids=ids).last_hidden_state
        for left in (0, 6):
            padded = torch.full((2, 32), 7)
            padded[:, left : left + 20] = ids
            mask = torch.zeros(2, 32, dtype=torch.long)
            mask[0, left : left + 20] = 1
            mask[1] = 1
            positions = (torch.arange(32) - left).clamp(min=0).expand(2, -1)
            for fill in (7, 55):
                padded[0, mask[0] == 0] = fill
                output = converted(input_ids=padded, attention_mask=mask, position_ids=positions).last_hidden_state
                torch.testing.assert_close(output[:1, left : left + 20], plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("head", "settings"),
    [*((head, SETTINGS) for head in HEADS), ("ForSequenceClassification", PrimalSettings.paper(rank=4))],
)
def test_a_saved_model_reloads_in_a_fresh_process_under_every_head(tmp_path, head, settings):
    converted, _ = convert(make(head=head), settings)
    converted.save_pretrained(tmp_path)
    verify_reload(tmp_path, converted, {name: value[:2] for name, value in random_batches()[0].items()})


@pytest.mark.parametrize("damage", ["a weight", "the code"])
def test_a_folder_that_does_not_reload_as_saved_is_refused(tmp_path, damage):
    from safetensors.torch import load_file, save_file

    converted, _ = convert(make())
    converted.save_pretrained(tmp_path)
    if damage == "a weight":
        weights = load_file(tmp_path / "model.safetensors")
        weights["encoder.layer.2.attention.self.primal.We"] += 1
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        message = r"tensor encoder.layer.2.attention.self.primal.We differs"
    else:
        code = tmp_path / "primal_attention.py"
        code.write_text(code.read_text().replace("torch.baddbmm(bias,", "torch.baddbmm(2 * bias,"))
        message = "outputs differ by"
    with pytest.raises(RuntimeError, match=message):
        verify_reload(tmp_path, converted, random_batches()[0])


def run_fresh(script, *arguments):
    """Run a script in a process that cannot import hf_primal; its standard output."""
    code = "import sys; sys.modules['hf_primal'] = None\n" + textwrap.dedent(script)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


def test_the_saved_folder_is_complete_for_its_users(tmp_path, monkeypatch):
    """Without trust: a loud error. With it: other heads, re-saving elsewhere, loading twice, the original gone."""
    converted, _ = convert(make(head="ForMaskedLM"))
    converted.save_pretrained(tmp_path / "saved")
    output = run_fresh(
        """
        import shutil, torch
        from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForTokenClassification
        saved, again = sys.argv[1:3]
        try:
            AutoModel.from_pretrained(saved, trust_remote_code=False)
        except ValueError as error:
            print("refused", "trust_remote_code" in str(error))
        model = AutoModelForMaskedLM.from_pretrained(saved, trust_remote_code=True)
        twice = AutoModelForMaskedLM.from_pretrained(saved, trust_remote_code=True)
        half = AutoModel.from_pretrained(saved, trust_remote_code=True, dtype=torch.bfloat16)
        print("bf16 finite", half(input_ids=torch.arange(5, 45)[None]).last_hidden_state.isfinite().all().item())
        head, info = AutoModelForTokenClassification.from_pretrained(saved, trust_remote_code=True, output_loading_info=True)
        print("missing", sorted(info["missing_keys"]), "unexpected", len([k for k in info["unexpected_keys"] if not k.startswith("cls")]))
        print("finite", all(t.isfinite().all().item() for t in head.state_dict().values()))
        model.save_pretrained(again)
        shutil.rmtree(saved)
        reloaded = AutoModelForMaskedLM.from_pretrained(again, trust_remote_code=True)
        same = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), reloaded.state_dict().values(), strict=True)]
        print("equal", all(same), len(same) > 50)
        """,
        tmp_path / "saved",
        tmp_path / "again",
    )
    assert output.splitlines() == [
        "refused True",
        "bf16 finite True",
        "missing ['classifier.bias', 'classifier.weight'] unexpected 0",
        "finite True",
        "equal True True",
    ]
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {f"modeling_primal.PrimalBert{head}" for head in HEADS} <= set(config["auto_map"].values())


def test_weights_that_a_checkpoint_lacks_are_initialised_not_left_as_found(tmp_path):
    torch.manual_seed(0)
    config = configuration_primal.PrimalBertConfig(**SIZES, primal_layers=[1, 2], primal={"rank": 4, "features": 8})
    for head in HEADS:
        model = getattr(modeling_primal, f"PrimalBert{head}")(config)
        layers = [module for module in model.modules() if isinstance(module, PrimalAttention)]
        assert len(layers) == 2
        for layer in layers:
            identity = layer.We.mT @ layer.We
            torch.testing.assert_close(identity, torch.eye(4).expand_as(identity), atol=1e-5, rtol=1e-5)
            assert (layer.Lambda >= 0).all() and (layer.Lambda <= 1).all() and layer.Lambda.std() > 0
    stock = transformers.BertModel(transformers.BertConfig(**SIZES))
    stock.save_pretrained(tmp_path)
    loaded = modeling_primal.PrimalBertModel.from_pretrained(tmp_path, config=config)
    assert all(tensor.isfinite().all() and tensor.abs().max() < 100 for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("form", ["object", "tuple"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering"])
def test_training_adds_the_ksvd_loss_and_evaluation_does_not(head, form):
    converted, _ = convert(make(head=head), refine_steps=0)
    with torch.no_grad():
        for module in converted.modules():
            if isinstance(module, PrimalAttention):
                module.Lambda.mul_(3.0)
    batch = random_batches()[0]
    labels = {"labels": batch["input_ids"]}
    if head == "ForSequenceClassification":
        labels = {"labels": torch.zeros(4, dtype=torch.long)}
    if head == "ForQuestionAnswering":
        labels = {"start_positions": torch.zeros(4, dtype=torch.long), "end_positions": torch.ones(4, dtype=torch.long)}

    def loss(weight, training):
        converted.train(training).config.ksvd_weight = weight
        output = converted(**batch, **labels, return_dict=form == "object")
        return output[0]

    assert torch.equal(loss(0.5, training=False), loss(0.0, training=False))
    assert (loss(0.5, training=True) - loss(0.0, training=True)).item() > 1e-3
    loss(0.5, training=True).backward()
    assert all(m.Lambda.grad.abs().sum() > 0 for m in converted.modules() if isinstance(m, PrimalAttention))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_convert_and_stay_finite(dtype):
    teacher = make(dtype=dtype)
    converted, report = convert(teacher)
    assert all(tensor.dtype == dtype for tensor in converted.state_dict().values() if tensor.is_floating_point())
    assert converted(**random_batches()[0]).last_hidden_state.isfinite().all()
    assert report.fidelity.hidden_cosine > 0.9


def test_a_number_that_half_precision_cannot_hold_is_refused_not_saved():
    primal = PrimalAttention(4, 8, SETTINGS)
    values = {name: torch.full_like(value, 1e6) for name, value in primal.initial_values().items()}
    primal.load_state_dict(values)
    with pytest.raises(ValueError, match=r"of layer 2 does not fit torch.float16; use --dtype bfloat16"):
        build_converted(make(dtype=torch.float16), {2: primal}, SETTINGS)


def test_kept_states_and_repeated_passes_give_the_same_model():
    kept, _ = convert(make(), memory_gb=1.0)
    repeated, _ = convert(make(), memory_gb=0.0)
    assert all(
        torch.equal(a, b) for a, b in zip(kept.state_dict().values(), repeated.state_dict().values(), strict=True)
    )


def test_the_states_kept_stay_within_the_limit(monkeypatch):
    teacher, batches = make(), random_batches(count=6)
    modules = {index: module for index, (_, module) in choose_layers(teacher, "last2").items()}
    one = sum(states.nbytes() for calls in Replay(teacher, modules, batches, 10**9)[0].values() for states in calls)
    forwards = []
    teacher.register_forward_pre_hook(lambda *_: forwards.append(1))
    for limit, second_pass in ((10**9, 0), (3 * one, 3), (0, 6)):
        replay = Replay(teacher, modules, batches, limit)
        list(replay)
        forwards.clear()
        list(replay)
        assert len(forwards) == second_pass
        assert sum(s.nbytes() for kept in replay.kept.values() for calls in kept.values() for s in calls) <= limit


def test_a_forward_ends_with_the_last_chosen_layer_once_it_is_known_which():
    teacher, batches = make(), random_batches(count=3)
    modules = {index: module for index, (_, module) in choose_layers(teacher, "0,1").items()}
    beyond = []
    teacher.base_model.encoder.layer[2].register_forward_pre_hook(lambda *_: beyond.append(1))

    seen = list(Replay(teacher, modules, batches, 0))

    assert len(beyond) == 1 and len(seen) == 3 and all(len(calls) == 1 for batch in seen for calls in batch.values())


def test_refinement_lowers_the_error_and_keeps_the_objective_at_zero():
    teacher = make()
    _, closed = convert(teacher, refine_steps=0)
    converted, refined = convert(teacher, refine_steps=60)
    for before, after in zip(closed.layers, refined.layers, strict=True):
        assert before.error_refined is None and before.error_closed_form == after.error_closed_form
        assert after.error_refined < after.error_closed_form
    layers = [module for module in converted.train().modules() if isinstance(module, PrimalAttention)]
    converted(**random_batches()[0])
    assert all(torch.isfinite(layer.Lambda).all() for layer in layers)


@pytest.mark.parametrize("length", [40, 500])
def test_texts_are_cut_to_what_the_model_has_positions_for(tokenizer, passages, length):
    torch.manual_seed(0)
    teacher = transformers.BertModel(bert_config(max_position_embeddings=60)).eval()
    _, report = convert_model(
        teacher, tokenizer, layers="last2", calibration=passages, settings=SETTINGS, refine_steps=1, max_length=length
    )
    assert report.calibration["max_length"] == min(length, 60) and report.calibration["joined_length"] == 60


def test_the_same_seed_gives_the_same_bytes():
    first, second = (convert(make())[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


GEMMA2 = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 30.0}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("name", "changes", "layers", "message"),
    [
        ("DebertaV2", {}, "last2", "does not go through Transformers' attention interface"),
        ("Mamba", {"state_size": 4}, "last2", "does not go through Transformers' attention interface"),
        ("Albert", {"embedding_size": 16}, "last2", r"shares 1 attention module.*use --layers all"),
        ("Gemma2", GEMMA2, "last2", r"caps its scores \(softcap\), which a replaced layer does not do"),
        ("T5", T5, "last2", "adds a position bias in a decoder.*replace layers of the encoder alone"),
    ],
)
def test_attention_that_cannot_be_replaced_is_refused(name, changes, layers, message):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    with pytest.raises(ValueError, match=message):
        convert(getattr(transformers, f"{name}Model")(config), layers=layers)


def test_images_convert_and_reload(tmp_path):
    torch.manual_seed(0)
    sizes = {
        name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=4)
    teacher = transformers.ViTForImageClassification(config).eval()
    batches = [{"pixel_values": torch.randn(4, 3, 32, 32)} for _ in range(3)]
    converted, report = convert_model(teacher, layers="last2", calibration=batches, settings=SETTINGS, refine_steps=1)
    assert report.latency == [] and report.break_even_tokens is None and report.calibration["tokens"] is None
    converted.save_pretrained(tmp_path)
    verify_reload(tmp_path, converted, batches[0])


def test_converting_twice_is_refused():
    converted, _ = convert(make())
    with pytest.raises(ValueError, match="converted model already"):
        convert(converted)


def test_texts_without_a_tokenizer_and_empty_data_are_refused():
    with pytest.raises(ValueError, match="need the model's tokenizer"):
        convert_model(make(), layers="last2", calibration=["some text"])
    for empty in ([], ["", "  "]):
        with pytest.raises(ValueError, match="calibration is empty"):
            convert_model(make(), layers="last2", calibration=empty)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last4", [8, 9, 10, 11]),
        ("8-11", [8, 9, 10, 11]),
        ("0,3", [0, 3]),
        ("all", list(range(12))),
        ("3, 0-1,last1", [0, 1, 3, 11]),
    ],
)
def test_layers_are_read_as_documented(text, expected):
    assert parse_layers(text, 12) == expected


@pytest.mark.parametrize("text", ["last13", "12", "8-12", "last0", "5-3"])
def test_layers_outside_the_model_say_what_exists(text):
    with pytest.raises(ValueError, match=r"outside this model's layers 0\.\.11; use all, last1\.\.last12"):
        parse_layers(text, 12)


@pytest.mark.parametrize("text", ["", "first2", "-1", "1;2", "last"])
def test_layers_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="is not understood; use all"):
        parse_layers(text, 12)


def test_a_deep_copy_is_the_same_model():
    converted, _ = convert(make())
    twin = copy.deepcopy(converted)
    batch = random_batches()[0]
    with torch.no_grad():
        assert torch.equal(twin(**batch).last_hidden_state, converted(**batch).last_hidden_state)


def test_a_release_of_transformers_that_is_too_old_is_refused_at_import():
    for given in ("4.57.6", "5.3.0"):
        with pytest.raises(ImportError, match=rf"needs transformers>=5.4, and {given} is installed; pip install"):
            check_transformers(given)
    for given in ("5.4.0", "5.24.0", "6.0.0.dev0", "10.1"):
        check_transformers(given)
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"transformers>={OLDEST_TRANSFORMERS}"' in pyproject
    code = "import transformers; transformers.__version__ = '5.3.0'; import hf_primal.modeling.configuration_primal"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 1 and "needs transformers>=5.4, and 5.3.0 is installed" in child.stderr.splitlines()[-1]


def test_which_layers_have_attentions_is_told(caplog, monkeypatch):
    converted, _ = convert(make())
    converted.set_attn_implementation("eager")
    told = []
    monkeypatch.setattr(modeling_primal.logger, "warning_once", told.append)
    output = converted(**random_batches()[0], output_attentions=True)
    assert len(output.attentions) == 1
    assert told == [
        "output_attentions: replaced layers [1, 2] have no attention matrix; the attentions are those of layers [0], "
        "in this order"
    ]
