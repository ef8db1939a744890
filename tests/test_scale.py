"""Configs of Accelerate for several GPUs: read by its own launcher; FSDP runs here on two CPU processes."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import finetune
import pytest
import torch
import transformers
from accelerate.commands import launch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from conftest import bert_config, random_batches
from finetune_config import read_config
from finetune_parts import block_classes, shared_parameters
from safetensors.torch import load_file

from hf_primal import PrimalSettings, convert_model

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs" / "accelerate"
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
SPLIT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
}
ENVIRONMENTS = {"multi_gpu": {}, "fsdp": SPLIT, "deepspeed": ZERO}


def test_every_config_is_tested():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(ENVIRONMENTS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_command_in_a_config_starts_the_recipe_with_the_environment_it_says(name, monkeypatch):
    (command,) = [line for line in (CONFIGS / f"{name}.yaml").read_text().splitlines() if "accelerate launch" in line]
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", raising=False)
    arguments = launch.launch_command_parser().parse_args(shlex.split(command.strip("# "))[2:])
    assert Path(arguments.config_file).resolve() == CONFIGS / f"{name}.yaml"
    assert Path(arguments.training_script).is_file()
    assert read_config(arguments.training_script_args).task == "sequence-classification"
    started = {}
    for launcher, environment_of in (
        ("multi_gpu_launcher", prepare_multi_gpu_env),
        ("deepspeed_launcher", lambda args: prepare_deepspeed_cmd_env(args)[1]),
    ):
        monkeypatch.setattr(launch, launcher, lambda args, make=environment_of: started.update(make(args)))
    launch.launch_command(arguments)
    assert arguments.nproc_per_node == "2"
    assert {"ACCELERATE_MIXED_PRECISION": "bf16", **ENVIRONMENTS[name]}.items() <= started.items()
    assert ("ACCELERATE_USE_FSDP" in started, "ACCELERATE_USE_DEEPSPEED" in started) == (
        name == "fsdp",
        name == "deepspeed",
    )
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in started  # it would win over --accumulation


def families():
    bert, llama = bert_config(), transformers.LlamaConfig(**SIZES, vocab_size=101, tie_word_embeddings=True)
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=101)
    return {
        "encoder": (transformers.BertForSequenceClassification(bert), ["BertLayer"], []),
        "masked": (transformers.BertForMaskedLM(bert), ["BertLayer"], ["cls.predictions.bias"]),
        "decoder": (transformers.LlamaForCausalLM(llama), ["LlamaDecoderLayer"], []),
        "vision": (transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES)), ["ViTLayer"], []),
        "t5": (transformers.T5EncoderModel(t5), ["T5Block"], ["shared.weight"]),
    }


@pytest.mark.parametrize("family", families())
def test_blocks_of_a_family_and_what_cannot_be_split_are_found(family):
    model, blocks, shared = families()[family]
    assert block_classes(model) == blocks and shared_parameters(model) == shared


def test_what_cannot_be_split_is_refused_in_one_line():
    usual = ["--model", "a", "--train", "b", "--output", "c", "--teacher", "d"]
    one, two = read_config([*usual, "--stages", "task"]), read_config([*usual, "--stages", "match", "task"])
    fsdp, deepspeed = (
        SimpleNamespace(distributed_type=kind) for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    )
    encoder, masked = families()["encoder"][0], families()["masked"][0]
    for accelerator, config in ((fsdp, one), (fsdp, two), (deepspeed, one)):
        finetune.check_sharding(accelerator, encoder, config)
    with pytest.raises(ValueError, match=r"^DeepSpeed takes one stage a run"):
        finetune.check_sharding(deepspeed, encoder, two)
    with pytest.raises(ValueError, match=r"^FSDP cannot split cls.predictions.bias, .* use accelerate/multi_gpu.yaml$"):
        finetune.check_sharding(fsdp, masked, one)


ON_CPU = """
import runpy, sys
from accelerate import DistributedType, PartialState

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate allows FSDP on GPUs alone
sys.argv = sys.argv[1:]
sys.path.insert(0, "recipes")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_fsdp_in_two_processes_equals_one_plain_process(tokenizer, passages, tmp_path):
    torch.manual_seed(0)
    teacher = transformers.BertForSequenceClassification(bert_config(num_labels=3)).eval()
    settings = PrimalSettings(rank=4, features=8, window=4)
    converted, _ = convert_model(
        teacher, layers="last2", calibration=random_batches(), settings=settings, refine_steps=0
    )
    for name, model in (("teacher", teacher), ("primal", converted)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with open(tmp_path / "rows.csv", "w", newline="") as file:  # of one text: match and distill divide by batch norms
        csv.writer(file).writerows([["label", "text"], *([place % 3, passages[0]] for place in range(24))])
    usual = ["--model", "primal", "--teacher", "teacher", "--train", "rows.csv", "--evaluation", "rows.csv"]
    usual = [str(tmp_path / value) if not value.startswith("--") else value for value in usual]
    usual += ["--stages", "match", "distill", "task", "--match_steps", "2", "--distill_steps", "2", "--max_steps", "2"]
    usual += [
        "--max_length",
        "16",
        "--log_steps",
        "1",
        "--learning_rate",
        "1e-3",
        "--ksvd_weight",
        "1",
        "--eval_batch_size",
        "4",
    ]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    finetune.main([*usual, "--output", str(tmp_path / "one"), "--batch_size", "8"])
    (tmp_path / "on_cpu.py").write_text(ON_CPU)
    call = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "fsdp.yaml")]
    call += ["--mixed_precision", "no", "--main_process_port", "0", str(tmp_path / "on_cpu.py"), "recipes/finetune.py"]
    call += [*usual, "--output", str(tmp_path / "two"), "--batch_size", "4"]
    child = subprocess.run(
        call, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert (tmp_path / "two-run" / "checkpoint-2-2" / "pytorch_model_fsdp.bin").is_file()
    one, two = (json.loads((tmp_path / name / "training_report.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2) and len(two["history"]) == 7
    for first, second in zip(one["history"], two["history"], strict=True):
        assert {key: value for key, value in second.items() if "loss" in key} == pytest.approx(
            {key: value for key, value in first.items() if "loss" in key}, rel=1e-4, abs=1e-6
        )
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    start = load_file(tmp_path / "primal" / "model.safetensors")
    assert any(not torch.equal(start[name], second[name]) for name in start if ".primal." in name)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-4, rtol=1e-4, msg=name)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "two", trust_remote_code=True)
    assert loaded.config.primal_layers == [1, 2]
