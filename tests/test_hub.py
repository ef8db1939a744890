"""Hub ids: a model served from 127.0.0.1 converts; a model that is not there is one quick line."""

import json
import subprocess
import sys

import pytest
from hub_server import environment, serving

REPOSITORY, DATASET = "user/tiny-bert", "user/words"
SMALL = ["--layers", "last2", "--rank", "4", "--features", "8", "--window", "4", "--refine-steps", "2"]


@pytest.fixture
def hub(saved_bert, tmp_path, passages):
    """The address of a hub with one model and one dataset."""
    words = tmp_path / "words"
    words.mkdir()
    (words / "train.csv").write_text("label,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(passages)))
    with serving() as hub:
        hub.add(REPOSITORY, saved_bert)
        hub.add(f"datasets/{DATASET}", words)
        yield hub.url


def command(folder, endpoint, *arguments):
    work = folder / "work"
    work.mkdir(exist_ok=True)
    call = [sys.executable, "-m", "hf_primal.convert.cli", *map(str, arguments)]
    inherited = environment(folder / "home", endpoint)
    return subprocess.run(call, cwd=work, env=inherited, capture_output=True, text=True, timeout=120), work


def test_a_hub_id_converts_and_is_named_in_the_card(hub, tmp_path, text_file):
    child, work = command(tmp_path, hub, REPOSITORY, *SMALL, "--calibration", text_file)
    assert child.returncode == 0, child.stderr
    card = (work / "tiny-bert-primal" / "README.md").read_text()
    assert f"base_model: {REPOSITORY}" in card and f"(https://huggingface.co/{REPOSITORY})" in card
    assert (work / "tiny-bert-primal" / "tokenizer.json").is_file()


def test_a_hub_dataset_calibrates(hub, tmp_path, saved_bert):
    child, work = command(tmp_path, hub, saved_bert, *SMALL, "--calibration", DATASET, "--samples", "20")
    assert child.returncode == 0, child.stderr
    report = json.loads((work / "tiny-bert-primal" / "conversion_report.json").read_text())
    assert report["calibration"]["source"] == DATASET and report["calibration"]["passages"] == 20


def test_a_dataset_that_the_hub_does_not_have_is_one_line(hub, tmp_path, saved_bert):
    child, work = command(tmp_path, hub, saved_bert, "--layers", "last2", "--calibration", "user/nothing")
    assert child.returncode == 2 and not list(work.iterdir())
    assert "--calibration 'user/nothing' is not a dataset that the hub gives" in child.stderr
    assert len(child.stderr.strip().splitlines()) == 1


def test_an_id_that_the_hub_does_not_have_is_one_line(hub, tmp_path):
    child, work = command(tmp_path, hub, "user/nothing", "--samples", "5")
    assert child.returncode == 2 and not list(work.iterdir())
    assert (
        child.stderr.strip()
        .splitlines()[-1]
        .startswith("primal-convert: cannot load 'user/nothing': there is no such folder here, and the hub gave")
    )
    assert len(child.stderr.strip().splitlines()) == 1


def test_without_a_hub_an_unknown_id_says_that_only_the_cache_was_searched(tmp_path):
    child, work = command(tmp_path, "http://127.0.0.1:9", "user/nothing", "--samples", "5")
    assert child.returncode == 2 and not list(work.iterdir())
    assert "the hub is not reachable and the local cache does not have it" in child.stderr
    assert len(child.stderr.strip().splitlines()) == 1
