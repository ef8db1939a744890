"""Pico models built from configs, a tokenizer built from a list, and calibration text; nothing is fetched."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist fills the cores; threads on top fight for them

import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: kernels then run on CPU tensors

from transformers import BertConfig, BertTokenizer

pytest_plugins = ["recipe_runs"]

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "house",
    "of",
    "and",
    "slowly",
    "quickly",
    "red",
    "blue",
    "small",
    "large",
    "then",
    "it",
]


@pytest.fixture
def fresh_compiler():
    """A torch.compile that remembers nothing: its limit of recompilations counts the models of every earlier test."""
    torch.compiler.reset()


def bert_config(**changes):
    fields = {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 160,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.2,
    }
    return BertConfig(**{**fields, **changes})


def random_batches(vocabulary=101, count=3, size=4, length=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        mask = torch.arange(length) < torch.randint(length // 2, length + 1, (size, 1), generator=generator)
        ids = torch.randint(5, vocabulary, (size, length), generator=generator)
        batches.append({"input_ids": ids * mask, "attention_mask": mask.long()})
    return batches


@pytest.fixture(scope="session")
def passages():
    drawn = random.Random(0)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(10, 40))) + "." for _ in range(40)]


@pytest.fixture(scope="session")
def tokenizer():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS, "."])}
    return BertTokenizer(vocab=vocabulary, model_max_length=160)


@pytest.fixture
def text_file(tmp_path, passages):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(passages))
    return path


@pytest.fixture
def saved_bert(tmp_path, tokenizer):
    """A folder with a pico BertForMaskedLM and its tokenizer."""
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    folder = tmp_path / "tiny-bert"
    BertForMaskedLM(bert_config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
