"""Pushing: what arrives on a hub loads from it without this package; what cannot be pushed is one line; no token shows."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import WORDS, bert_config
from hub_server import FORGED, READER, TOKEN, environment, serving
from huggingface_hub import constants
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM

from hf_primal.convert import cli, run
from hf_primal.convert.config import TASKS
from hf_primal.convert.hub import public_command
from hf_primal.convert.upload import LEFT_BEHIND, hub_card
from hf_primal.model_cards import FineTuning, finetuned_card

SMALL = ["--layers", "last2", "--rank", "4", "--features", "8", "--window", "4", "--refine-steps", "2"]
LOAD = """
import json, sys
sys.modules["hf_primal"] = None
from transformers import AutoModel, AutoTokenizer
name, text, revision = sys.argv[1:]
model = AutoModel.from_pretrained(name, trust_remote_code=True, revision=revision)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True, revision=revision)
print(json.dumps(model(**tokenizer(text, return_tensors="pt")).last_hidden_state.tolist()))
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer):
    """A folder with a pico BertForMaskedLM and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("teacher") / "tiny-bert"
    BertForMaskedLM(bert_config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory, passages):
    path = tmp_path_factory.mktemp("texts") / "my_texts.txt"
    path.write_text("\n".join(passages))
    return path


@pytest.fixture(scope="module")
def converted(teacher, texts, tmp_path_factory):
    """The folder of a conversion; not to be changed."""
    folder = tmp_path_factory.mktemp("converted") / "tiny-primal"
    assert cli.main([str(teacher), *SMALL, "--calibration", str(texts), "--output", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture
def folder(converted, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(converted, tmp_path / converted.name)


@pytest.fixture
def hub():
    with serving() as hub:
        yield hub


@pytest.fixture
def command(hub, tmp_path):
    """`primal-convert` in a process whose hub is `hub`; the token shows nowhere in what it prints, writes or uploads."""

    def call(*arguments, token=TOKEN, endpoint=None):
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        child = subprocess.run(
            [sys.executable, "-m", "hf_primal.convert.cli", *map(str, arguments)],
            cwd=work,
            env=environment(tmp_path / "home", endpoint or hub.url, token),
            capture_output=True,
            text=True,
            timeout=120,
        )
        written = [path.read_bytes() for path in work.rglob("*") if path.is_file()]
        uploaded = [
            data for kept in hub.repositories.values() for files in kept.commits.values() for data in files.values()
        ]
        for secret in (TOKEN, READER, FORGED):
            assert secret not in child.stdout + child.stderr
            assert not any(secret.encode() in data for data in [*written, *uploaded, *hub.objects.values()])
        return child

    return call


@pytest.fixture
def push_here(hub, monkeypatch, capsys):
    """The one line of the error of `primal-convert push` in this process, with `hub` as its hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def call(*arguments, token=TOKEN):
        monkeypatch.setenv("HF_TOKEN", token)
        line = fails(capsys, "push", *arguments)
        assert token not in line
        return line

    return call


def fails(capsys, *arguments):
    """The one line of an error of the command in this process."""
    capsys.readouterr()
    status = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (status, out, len(err.strip().splitlines())) == (2, "", 1), err
    assert err.startswith("primal-convert: ")
    return err.strip()


def one_line(child):
    """The one line of an error of a process."""
    assert child.returncode == 2 and child.stdout == "", (child.stdout, child.stderr)
    assert len(child.stderr.strip().splitlines()) == 1 and child.stderr.startswith("primal-convert: "), child.stderr
    return child.stderr.strip()


def load_from(hub, tmp_path, name, text, revision="main", token=None):
    """Last hidden states of a model of the hub, in a process that has no hf_primal."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, name, text, revision],
        cwd=tmp_path,
        env=environment(tmp_path / "other-home", hub.url, token),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return torch.tensor(json.loads(child.stdout))


def test_what_was_pushed_loads_from_the_hub_without_this_package(hub, command, converted, tmp_path):
    before = {path.name: path.read_bytes() for path in converted.iterdir()}
    child = command("push", converted, "user/tiny")
    assert child.returncode == 0, child.stderr
    assert child.stdout == f"{hub.url}/user/tiny\n"

    text = " ".join(WORDS[:9])
    model = AutoModel.from_pretrained(converted, trust_remote_code=True)
    expected = model(**AutoTokenizer.from_pretrained(converted)(text, return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(load_from(hub, tmp_path, "user/tiny", text), expected)

    files = hub.files("user/tiny")
    assert set(files) == set(before)
    changed = {name for name in files if files[name] != before[name]}
    assert changed == {"README.md", "conversion_report.json"}
    assert {path.name: path.read_bytes() for path in converted.iterdir()} == before
    assert not hub.repositories["user/tiny"].private


def test_the_pushed_card_names_the_hub_id_and_no_folders_and_has_its_results(hub, command, converted, teacher):
    assert command("push", converted, "user/tiny").returncode == 0
    files = {name: hub.files("user/tiny")[name].decode() for name in ("README.md", "conversion_report.json")}
    _, front, body = files["README.md"].split("---\n", 2)
    assert '.from_pretrained("user/tiny", trust_remote_code=True)' in body
    assert f'from_pretrained("{converted.name}"' in (converted / "README.md").read_text()
    (index,) = yaml.safe_load(front)["model-index"]
    assert index["results"][0]["dataset"]["name"] == "held-out part of my_texts.txt"
    report = json.loads((converted / "conversion_report.json").read_text())
    kept = [metric["value"] for metric in index["results"][0]["metrics"]]
    assert kept == pytest.approx([report["fidelity"]["hidden_cosine"], report["fidelity"]["logits_kl"]], abs=1e-5)
    pushed = json.loads(files["conversion_report.json"])
    assert pushed["calibration"]["source"] == "my_texts.txt" and pushed["layers"] == report["layers"]
    for text in files.values():
        assert str(teacher.parent) not in text and "primal-convert tiny-bert --layers last2" in text


def test_a_private_push_is_private_and_stays_on_its_branch(hub, command, converted, tmp_path):
    hub.add("team/tiny")
    hub.repositories["team/tiny"].private = True
    child = command("push", converted, "team/tiny", "--private", "--revision", "v1/try")
    assert child.returncode == 0 and child.stdout == f"{hub.url}/team/tiny/tree/v1/try\n", child.stderr
    assert hub.files("team/tiny") == {} and "model.safetensors" in hub.files("team/tiny", "v1/try")
    assert load_from(hub, tmp_path, "team/tiny", "the cat", "v1/try", TOKEN).shape == (1, 4, 32)

    assert command("push", converted, "user/new", "--private").returncode == 0
    assert hub.repositories["user/new"].private


def test_a_second_push_replaces_the_weights_and_leaves_other_files(hub, command, folder):
    hub.add("user/tiny")
    hub.files("user/tiny").update({"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"})
    for _ in range(2):
        assert command("push", folder, "user/tiny").returncode == 0
    files = hub.files("user/tiny")
    assert "model-00001-of-00002.safetensors" not in files and files["notes.txt"] == b"mine"
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_leftovers_of_training_and_hidden_files_stay_here(hub, command, folder):
    made = ("checkpoint-5/model.safetensors", "optimizer.pt", "training_args.bin", ".env", "runs/1/events", "x.tmp")
    for name in made:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TOKEN)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert command("push", folder, "user/tiny").returncode == 0
    assert set(hub.files("user/tiny")).isdisjoint(made) and "1_Pooling/config.json" in hub.files("user/tiny")


def test_a_folder_with_the_token_in_a_file_is_refused(hub, push_here, folder):
    (folder / "notes.md").write_text(f"my token is {TOKEN}")
    assert "notes.md holds your Hugging Face token, so nothing was pushed" in push_here(folder, "user/tiny")
    assert hub.requests == []


REFUSED = {
    "bad token": (FORGED, ["user/tiny"], "the hub does not accept this Hugging Face token"),
    "broken token": ("hf_user\x07", ["user/tiny"], "the Hugging Face token has characters that no token has"),
    "reading token": (READER, ["reader/tiny"], "this Hugging Face token may only read"),
    "somebody else's": (TOKEN, ["other/model"], "other/model is not yours: this token may push to user/model, or to a"),
    "an organisation's": (TOKEN, ["observed/tiny"], "you may not write to observed/tiny"),
    "public": (TOKEN, ["user/shown", "--private"], "user/shown exists and is public"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_would_not_take_is_one_line(hub, push_here, converted, case):
    token, arguments, message = REFUSED[case]
    hub.add("other/model")
    hub.add("user/shown")
    assert message in push_here(converted, *arguments, token=token)
    assert set(hub.repositories) == {"other/model", "user/shown"} and not any(map(hub.files, hub.repositories))


@pytest.mark.parametrize(
    "status, message",
    [
        (401, "does not accept this"),
        (403, "may not write to user/tiny"),
        (404, "has no user/tiny"),
        (409, "is changing user/tiny"),
        (418, "refuses user/tiny: no luck, (token)"),
    ],
)
def test_what_the_hub_says_in_the_middle_is_one_line_without_the_token(hub, push_here, converted, status, message):
    hub.broken["/commit/"] = status
    assert message in push_here(converted, "user/tiny")
    assert hub.files("user/tiny") == {}


def test_no_token_and_no_network_are_one_line(hub, command, converted, capsys):
    line = "primal-convert: no Hugging Face token: run `hf auth login` or set HF_TOKEN"
    assert one_line(command("push", converted, "user/tiny", token=None)) == line
    away = one_line(command("push", converted, "user/tiny", endpoint="http://127.0.0.1:9"))
    assert "no network: http://127.0.0.1:9 does not answer" in away
    assert "no network: HF_HUB_OFFLINE is set" in fails(capsys, "push", converted, "user/tiny")
    assert hub.requests == []


def test_a_traceback_has_no_token_in_it(hub, command, converted):
    hub.broken["/api/repos/create"] = 418
    child = command("push", converted, "user/tiny", "--debug")
    assert child.returncode == 1 and "Traceback" in child.stderr and "no luck, (token)" in child.stderr


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "user/", "/tiny", "user/ti ny", "user/a--b", "user/x.git", ""])
def test_a_name_that_is_none_is_told_first(capsys, converted, teacher, name):
    assert f"{name!r} is no name to push to; give USER/NAME" in fails(capsys, "push", converted, name)
    assert "is no name to push to" in fails(capsys, teacher, "--push-to-hub", name, "--dry-run")


def test_a_folder_that_is_not_whole_is_refused(capsys, folder, teacher, tmp_path):
    assert "is not a folder; give one" in fails(capsys, "push", tmp_path / "none", "user/tiny")
    assert "is not a converted model" in fails(capsys, "push", teacher, "user/tiny")
    assert "is not a converted model" in fails(capsys, "push", tmp_path, "user/tiny")
    for needed in ("README.md", "model.safetensors", "primal_attention.py", "modeling_primal.py"):
        shutil.move(folder / needed, tmp_path / needed)
        assert f"has no {needed} (" in fails(capsys, "push", folder, "user/tiny")
        shutil.move(tmp_path / needed, folder / needed)
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    (folder / "model.safetensors").unlink()
    assert "has no model-00001-of-00002.safetensors" in fails(capsys, "push", folder, "user/tiny")


def test_a_conversion_pushes_what_it_has_proven(hub, command, teacher, texts, tmp_path):
    child = command(teacher, *SMALL, "--calibration", texts, "--push-to-hub", "user/tiny", "--private", "--json")
    assert child.returncode == 0, child.stderr
    saved = tmp_path / "work" / "tiny-bert-primal"
    assert json.loads(child.stdout) == json.loads((saved / "conversion_report.json").read_text())
    assert hub.repositories["user/tiny"].private
    assert set(hub.files("user/tiny")) == {path.name for path in saved.iterdir()}
    assert b'from_pretrained("user/tiny"' in hub.files("user/tiny")["README.md"]


def test_a_push_that_fails_in_the_end_leaves_the_folder_and_says_how_to_push_it(hub, command, teacher, texts, tmp_path):
    hub.broken["/commit/"] = 403
    options = [*SMALL, "--calibration", texts, "--push-to-hub", "user/tiny", "--quiet"]
    line = one_line(command(teacher, *options))
    saved = tmp_path / "work" / "tiny-bert-primal"
    assert line.endswith(f"the model is saved, push it with: primal-convert push {saved} user/tiny")
    hub.broken.clear()
    assert command(*line.split("primal-convert ")[-1].split()).returncode == 0
    assert "model.safetensors" in hub.files("user/tiny")


def test_what_keeps_a_conversion_from_pushing_is_told_before_any_work(hub, command, teacher, tmp_path, capsys):
    line = one_line(command(teacher, "--push-to-hub", "user/tiny", token=None))
    assert "no Hugging Face token" in line and not list((tmp_path / "work").iterdir())
    assert "--private is for --push-to-hub" in fails(capsys, teacher, "--private")
    assert cli.main([str(teacher), "--layers", "last2", "--push-to-hub", "user/tiny", "--dry-run"]) == 0  # offline
    assert hub.requests == []


def test_an_interrupted_push_says_that_the_folder_is_there(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "push", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"the model is saved, push it with: primal-convert push .*--private$"):
        run.push_saved(tmp_path, "user/tiny", True)


def test_push_is_a_word_of_the_command_and_a_folder_of_that_name_is_not(capsys):
    for arguments, said in ((["push", "--help"], "DIR USER/NAME"), (["--help"], "primal-convert push DIR USER/NAME")):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0 and said in " ".join(capsys.readouterr().out.split())
    assert "neither a folder nor a hub id" in fails(capsys, "./push", "--layers", "last2")


@pytest.mark.parametrize(
    "task", ["sequence-classification", "token-classification", "masked-lm", "question-answering", "multiple-choice"]
)
def test_the_code_in_the_card_of_a_fine_tuned_model_runs(converted, monkeypatch, capsys, task):
    """With heads that were never trained: the code is what is tried."""
    tuning = FineTuning(
        title=converted.name, auto_class=TASKS[task], base_model=None, task=task, dataset="x", metrics={},
        teacher_metrics=None, trained="all", stages=[], primal_layers=[1, 2], hyperparameters={}, command="", versions={},
    )  # fmt: skip
    (code,) = re.findall(r"```python\n(.*?)```", finetuned_card(tuning), re.S)
    monkeypatch.chdir(converted.parent)
    exec(code, {})
    assert capsys.readouterr().out.strip()


def test_only_the_code_of_a_card_changes():
    card = '# a-b\n\n"a-b" is it.\n\n```python\nload("a-b")\n```\n\n```\nprimal-convert x --output "a-b"\n```\n'
    assert hub_card(card, "user/c") == card.replace('load("a-b")', 'load("user/c")')
    assert hub_card("no title", "user/c") == "no title"


@pytest.mark.parametrize(
    "command, public",
    [
        ("primal-convert bert-base-uncased --layers 8-11", None),
        ("primal-convert user/name --output out/there", None),
        ("primal-convert /home/me/model --calibration ../private/t.txt", "primal-convert model --calibration t.txt"),
        ("primal-convert '/home/me/my model/' --output=/tmp/x", "primal-convert 'my model' --output=x"),
        (r"primal-convert 'C:\Users\me\model'", "primal-convert model"),
    ],
)
def test_a_command_in_public_has_no_folders_of_this_machine(command, public):
    assert public_command(command) == (public or command)


def test_nothing_that_a_model_needs_is_left_behind(converted):
    import fnmatch

    assert not [path.name for path in converted.iterdir() if any(fnmatch.fnmatch(path.name, p) for p in LEFT_BEHIND)]
    assert not re.search(r"hf_[a-z]+_\d", (converted / "config.json").read_text())
