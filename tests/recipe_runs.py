"""What the tests of the Accelerate recipe share: tiny models and data as fixtures, and a run in this process."""

import csv
import json

import finetune
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from conftest import bert_config, random_batches
from safetensors.torch import load_file

from hf_primal import PrimalSettings, convert_model

SETTINGS = PrimalSettings(rank=4, features=8, window=4)


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer):
    """Folders of a tiny encoder, decoder and vision model, and of what they were converted from."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    kinds = {
        "encoder": transformers.BertModel(bert_config()),
        "masked": transformers.BertForMaskedLM(bert_config()),
        "decoder": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, vocab_size=101, max_position_embeddings=160)
        ),
        "vision": transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=24, patch_size=4)),
    }
    for name, teacher in kinds.items():
        calibration = random_batches() if name != "vision" else [{"pixel_values": torch.randn(4, 3, 24, 24)}] * 3
        converted, _ = convert_model(
            teacher.eval(), layers="last2", calibration=calibration, settings=SETTINGS, refine_steps=0
        )
        for kind, model in (("teacher", teacher), ("primal", converted)):
            model.save_pretrained(folder / f"{name}-{kind}")
            if name != "vision":
                tokenizer.save_pretrained(folder / f"{name}-{kind}")
            else:
                size = {"height": 24, "width": 24}
                transformers.ViTImageProcessor(size=size).save_pretrained(folder / f"{name}-{kind}")
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory, passages):
    """Files for every task, from the same passages."""
    folder = tmp_path_factory.mktemp("data")
    with open(folder / "rows.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "score", "text", "other"])
        for place, text in enumerate(passages[:24]):
            writer.writerow([place % 3, place % 5 / 5, text, passages[-place]])
    with open(folder / "words.jsonl", "w") as file:
        for text in passages[:24]:
            words = text.split()[:12]
            file.write(json.dumps({"tokens": words, "tags": [len(word) % 3 for word in words]}) + "\n")
    (folder / "text.txt").write_text("\n".join(passages))
    from PIL import Image

    for split in ("train", "validation"):
        for place in range(8):
            (folder / "images" / split / f"class{place % 2}").mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (24, 24), (place * 20, 255 - place * 20, 9))
            image.save(folder / "images" / split / f"class{place % 2}" / f"{place}.png")
    return folder


@pytest.fixture
def without_reload(monkeypatch):
    """No fresh process proves that a result reloads, which takes nine tenths of a tiny run."""
    monkeypatch.setattr(finetune, "verify_reload", lambda *arguments: None)


def arguments(model, train, output, *flags):
    """Those of a tiny run."""
    usual = ["--max_steps", 2, "--batch_size", 4, "--max_length", 32, "--log_steps", 1]
    return [str(one) for one in ("--model", model, "--train", train, "--output", output, *usual, *flags)]


def forget_runs():
    """Accelerate keeps its state in the process; the next run begins anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(model, train, output, *flags):
    """One run of the recipe in this process; its report."""
    forget_runs()
    finetune.main(arguments(model, train, output, *flags))
    return json.loads((output / "training_report.json").read_text())


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_weights(first, second, tolerance=0.0):
    for (name, one), two in zip(weights(first).items(), weights(second).values(), strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance, msg=name)
