"""What is written is true: cards render, the README's options and numbers exist, imports go down only."""

import ast
import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results

import hf_primal
from hf_primal import PrimalSettings
from hf_primal.convert.cli import build_parser
from hf_primal.convert.config import TASKS, ConvertConfig
from hf_primal.model_cards import FineTuning, converted_card, finetuned_card
from hf_primal.model_cards.front_matter import HUB_TASKS
from hf_primal.report import ConversionReport, Fidelity, Latency, LayerReport, break_even, write_plots

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LEVELS = ["modeling", "layers", "below", "convert", "recipes"]
BELOW = (
    "ksvd",
    "classes",
    "observe",
    "moments",
    "landmarks",
    "factors",
    "readout",
    "report",
    "initialise",
    "refine",
    "surgery",
)


def imports_of(path):
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def level_of(name):
    """Where a module of ours stands; higher levels may import lower ones."""
    part = name.removeprefix("hf_primal.").split(".")[0]
    return LEVELS.index("below" if part in BELOW else {"model_cards": "convert"}.get(part, part))


def sources():
    for folder, package in (
        ("hf_primal", ""),
        ("convert", "convert."),
        ("model_cards", "convert."),
        ("recipes", "recipes."),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            relative = package + ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            if relative != "__init__":
                yield path, relative


def test_imports_go_down_only():
    for path, name in sources():
        for imported in imports_of(path):
            if imported.startswith("hf_primal."):
                assert level_of(imported) <= level_of(name), f"{name} imports {imported}"


def test_the_parts_of_the_fit_do_not_import_in_circles():
    position = {name: i for i, name in enumerate(BELOW)}
    for path, name in sources():
        if name in position:
            ours = [i.removeprefix("hf_primal.") for i in imports_of(path) if i.startswith("hf_primal.")]
            assert all(position[i] < position[name] for i in ours if i in position), (name, ours)


def test_shipped_files_import_torch_transformers_and_each_other_only():
    for path in (ROOT / "hf_primal" / "modeling").glob("*.py"):
        for imported in imports_of(path):
            standard = ("collections.abc", "copy", "dataclasses", "functools", "inspect", "re", "types", "typing")
            assert (
                imported.split(".")[0] in ("torch", "transformers")
                or (imported.split(".")[0] == "triton" and "try:\n    import triton\n" in path.read_text())
                or imported in standard
                or re.fullmatch(r"\.\w+", imported)
            ), (path.name, imported)
        assert not re.search(r"^\s*from \. import", path.read_text(), re.M)  # not followed when files are copied


def test_every_shipped_file_is_named_by_the_two_that_are_loaded():
    """The loader of Transformers 5.4 copies from a local folder what these import, and not what that imports."""
    folder = ROOT / "hf_primal" / "modeling"
    entries = {"modeling_primal", "configuration_primal"}
    named = {name.lstrip(".") for entry in entries for name in imports_of(folder / f"{entry}.py") if name[0] == "."}
    assert named | entries == {path.stem for path in folder.glob("*.py")} - {"__init__"}


def make_report(**changes):
    layer = LayerReport(2, "encoder.layer.2.attention.self", 12, 32, [0.8, 0.1, 0.05], 0.9, 0.05, 0.03)
    fields = {
        "model": "user/base", "converted_class": "PrimalBertModel", "layers": [layer], "settings": {"rank": 2, "window": 16},
        "calibration": {"source": "text.txt", "max_length": 192}, "fidelity": Fidelity(30, 3000, 0.99, 0.01, False),
        "parameters_teacher": 1000, "parameters_converted": 1100,
        "latency": [Latency(128, 10.0, 12.0), Latency(512, 50.0, 40.0)], "break_even_tokens": 230, "seconds": {}, "seed": 0,
        "device": "cpu", "dtype": "float32", "versions": {"hf_primal": "0.1.0"}, "command": "primal-convert user/base",
    }  # fmt: skip
    return ConversionReport(**{**fields, **changes})


VARIANTS = {
    "full": make_report(),
    "no latency": make_report(latency=[], break_even_tokens=None),
    "never faster": make_report(break_even_tokens=None),
    "not refined": make_report(layers=[LayerReport(0, "x", 1, 8, [1.0], 1.0, 0.5, None)]),
    "calibration data, no logits, notes": make_report(
        fidelity=Fidelity(1, 10, 0.9, None, True), notes=["a note"], command=None
    ),
}


TUNING = FineTuning(
    title="base-primal-sst2", auto_class="AutoModelForSequenceClassification", base_model="user/base-primal",
    task="sequence-classification", dataset="user/reviews",
    metrics={"eval_accuracy": 0.91, "eval_loss": 0.25, "eval_runtime": 3.0, "epoch": 2.0, "eval_f1": float("nan")},
    teacher_metrics={"accuracy": 0.92}, trained="primal", stages=["The replaced layers, 100 steps.", "All, 50 steps."],
    primal_layers=[2, 3], hyperparameters={"learning_rate": 1e-3, "metric": "a|b", "data": "/home/me/train.csv"},
    command="python recipes/finetune.py /home/me/base-primal --data ../secret/train.csv",
    versions={"hf_primal": "0.1.0"}, license_id="apache-2.0",
)  # fmt: skip
CARDS = sorted((ROOT / "model_cards").glob("*/README.md"))


def parts_of(card):
    """Front matter, results of its model-index, and body; no template is left over."""
    _, front, body = card.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert not re.search(r"\{\{|\{%|%\}|\}\}", card) and "nan" not in front
    found = []
    if "model-index" in matter:
        name, found = model_index_to_eval_results(matter["model-index"])
        assert name == re.search(r"^# (.+)", body, re.M)[1]
        data = {key: value for key, value in matter.items() if key != "model-index"}
        again = yaml.safe_load(ModelCardData(**data, model_name=name, eval_results=found).to_yaml())
        assert again == matter
    return matter, found, body


def check_body(body, folder):
    """Links lead somewhere, tables are whole, Python parses, and no path of this machine is named."""
    for link in re.findall(r"\]\(([^)]*)\)", body):
        assert link.startswith("https://") or (folder / link).is_file(), link
    tables = [block for block in body.split("\n\n") if block.lstrip().startswith("|")]
    assert tables
    for table in tables:
        lines = [line for line in table.strip().splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1, table
    for code in re.findall(r"```python\n(.*?)```", body, re.S):
        ast.parse(code)
    assert not re.search(r"(?<![\w/:.])(/(home|tmp|work|root|Users)\b|\.\./|[A-Z]:\\)", body)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base_model", ["user/base", None])
def test_cards_render_with_valid_front_matter_and_whole_links(tmp_path, variant, base_model):
    report = VARIANTS[variant]
    plots = write_plots(report, tmp_path)
    matter, found, body = parts_of(
        converted_card(report, "base-primal", "AutoModel", plots, base_model, "apache-2.0"),
    )
    assert matter["library_name"] == "transformers" and matter["license"] == "apache-2.0"
    assert matter.get("base_model") == base_model
    assert "None" not in body.replace("| None |", "")
    check_body(body, tmp_path)
    assert f"[user/base](https://huggingface.co/{base_model})" in body or base_model is None
    assert [result.metric_value for result in found] == [
        value for value in (report.fidelity.hidden_cosine, report.fidelity.logits_kl) if value is not None
    ]
    held_out = "text.txt" if report.fidelity.calibration_data else "held-out part of text.txt"
    assert {(result.dataset_name, result.dataset_type) for result in found} == {(held_out, "text")}


@pytest.mark.parametrize(
    "auto_class, task, tag",
    [
        ("AutoModel", "feature-extraction", None),
        ("AutoModelForMaskedLM", "fill-mask", "fill-mask"),
        ("AutoModelForCausalLM", "text-generation", "text-generation"),
        ("AutoModelForSeq2SeqLM", "text2text-generation", None),
        ("AutoModelForImageClassification", "image-classification", "image-classification"),
    ],
)
def test_the_task_of_a_card_follows_from_the_head(auto_class, task, tag):
    matter, found, _ = parts_of(converted_card(make_report(), "base-primal", auto_class, []))
    assert {result.task_type for result in found} == {task} and matter.get("pipeline_tag") == tag


def test_every_head_that_the_command_knows_has_a_task():
    assert set(TASKS.values()) - set(HUB_TASKS) == {"AutoModel", "AutoModelForPreTraining"}


def test_a_card_names_local_files_without_their_folders():
    report = make_report(
        model="/home/me/base", command="primal-convert /home/me/base --calibration ../secret/t.csv",
        calibration={"source": "/home/me/secret/t.csv", "max_length": 192, "tokens": 9},
    )  # fmt: skip
    matter, found, body = parts_of(converted_card(report, "base-primal", "AutoModel", []))
    check_body(body, ROOT)
    assert "secret" not in body and "primal-convert base --calibration t.csv" in body
    assert (found[0].dataset_name, found[0].dataset_type) == ("held-out part of t.csv", "csv")
    assert matter["pipeline_tag"] == "feature-extraction"


@pytest.mark.parametrize("task", [*TASKS, "something else"])
@pytest.mark.parametrize("teacher", [True, False])
def test_cards_of_fine_tuned_models_render(tmp_path, task, teacher):
    auto_class = TASKS.get(task, "AutoModel")
    tuning = dataclasses.replace(TUNING, task=task, auto_class=auto_class)
    if not teacher:
        tuning = dataclasses.replace(tuning, teacher_metrics=None, base_model=str(tmp_path), dataset="/home/me/t.csv")
    matter, found, body = parts_of(finetuned_card(tuning))
    check_body(body, tmp_path)
    assert {result.metric_type: result.metric_value for result in found} == {"accuracy": 0.91, "loss": 0.25}
    assert matter.get("base_model") == ("user/base-primal" if teacher else None)
    assert "python recipes/finetune.py base-primal --data train.csv" in body and "secret" not in body
    assert ("| accuracy | 0.91 | 0.92 |" if teacher else "| accuracy | 0.91 |\n") in body
    assert "2. All, 50 steps.\n" in body and "Trained: the Primal-Attention parameters and the head." in body
    assert {(result.dataset_name, result.dataset_type) for result in found} == {
        ("user/reviews", "user/reviews") if teacher else ("t.csv", "csv")
    }
    (code,) = re.findall(r"```python\n(.*?)```", body, re.S)
    assert '"base-primal-sst2"' in code and (task == "something else" or auto_class in code or "pipeline(" in code)


def test_a_fine_tuned_model_without_numbers_says_so():
    matter, _, body = parts_of(finetuned_card(dataclasses.replace(TUNING, metrics={}, stages=[], base_model=None)))
    assert "model-index" not in matter and "Not measured." in body and "A model fine-tuned for" in body


@pytest.mark.parametrize("path", CARDS, ids=[path.parent.name for path in CARDS])
def test_committed_cards_are_whole(path):
    matter, found, body = parts_of(path.read_text())
    assert {"library_name", "license", "base_model", "tags", "model-index"} <= set(matter) and found
    check_body(body, path.parent)
    for image in path.parent.glob("*.png"):
        assert f"({image.name})" in body and image.stat().st_size < 100_000


def test_the_committed_card_of_the_demo_is_of_the_settings_that_the_demo_has_now():
    card = (ROOT / "model_cards" / "all-MiniLM-L6-v2-primal" / "README.md").read_text()
    settings = dict(re.findall(r"^\| (\w+) \| (\S+) \|$", card, re.M))
    assert {
        name: str(value) for name, value in dataclasses.asdict(PrimalSettings()).items()
    }.items() <= settings.items()


def test_reports_survive_json():
    for report in VARIANTS.values():
        again = json.loads(report.to_json())
        assert again["schema_version"] == 1 and again["layers"][0]["index"] == report.layers[0].index


def test_break_even_is_read_off_between_the_lengths():
    assert break_even([Latency(128, 1.0, 2.0), Latency(512, 1.0, 0.5)]) in range(128, 512)
    assert break_even([Latency(128, 2.0, 1.0), Latency(512, 2.0, 1.0)]) == 128
    assert break_even([Latency(128, 1.0, 2.0), Latency(512, 1.0, 2.0)]) is None
    assert break_even([]) is None


def test_the_options_of_the_command_are_the_fields_of_its_config():
    flags = {action.dest for action in build_parser()._actions} - {
        "help",
        "version",
        "demo",
        "list_families",
        "dry_run",
        "json",
        "quiet",
        "debug",
    }
    assert flags == set(ConvertConfig.__dataclass_fields__) - {"base_model"}


def test_every_option_that_the_readme_names_exists():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    for line in README.splitlines():
        if "primal-convert" in line or re.search(r"`--[a-z]", line):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line):
                assert option in known | {"--data-dir"}, f"{option} in: {line}"


def test_python_in_the_readme_parses_and_names_what_exists():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_primal":
                assert all(hasattr(hf_primal, alias.name) for alias in node.names)


def test_links_in_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_result_table_of_the_readme_is_the_result_file():
    results = json.loads((ROOT / "recipes/benchmarks/results/fidelity.json").read_text())["rows"]
    found = 0
    for line in README.splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] in results and " / " in line:
            found += 1
            row = results[cells[0]]
            steps = [row[key] for key in ("svd, 0 steps", "svd, 200 steps", "band alone, 0 steps") if key in row]
            numbers = [f"{step[key]:.3f}" for step in steps for key in ("sts_of_teacher", "cosine", "long_cosine")]
            assert [n for cell in cells[1:] for n in re.findall(r"\d\.\d{3}", cell)] == numbers, line
    assert found == len(results) == 5


def test_the_decoder_tables_of_the_readme_are_the_result_file():
    results = json.loads((ROOT / "recipes/benchmarks/results/causal.json").read_text())
    language, found = results["language"], 0
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0] in language:
            row = language[cells[0]]
            for cell, stage in zip(cells[1:], ("closed form", "refined", "band alone"), strict=True):
                if stage in row:
                    kept = row[stage]
                    expected = f"{kept['perplexity_percent']:+.1f} % / {kept['drop_kept_percent']:.0f} %"
                    assert cell == expected, line
            found += 1
        tokens = cells[0].replace(",", "")
        if len(cells) == 4 and tokens in results["generation"]:
            models = results["generation"][tokens]
            for cell, name in zip(cells[1:], ("teacher", "last4 replaced", "all replaced"), strict=True):
                speed, size = models[name]["decode_tokens_per_second"], models[name]["state_bytes"] / 1e6
                assert cell == f"{speed:.0f} tokens/s, {size:.1f} MB", line
            found += 1
    assert found == len(language) - 1 + 3
    teacher = language["teacher"]
    for number in ("perplexity", "first_reading", "second_reading"):
        assert f"{teacher[number]:.1f}" in README


def test_the_fine_tuning_table_of_the_readme_is_the_result_file():
    results = json.loads((ROOT / "recipes/benchmarks/results/finetune.json").read_text())["accuracy"]
    rows = {cells[0]: cells[1:] for cells in table_rows() if len(cells) == 3}
    for name in results["sst2"]:
        found = [results[task][name] for task in ("sst2", "trec")]
        assert all(len(row["seeds"]) == 3 for row in found)
        expected = [f"{100 * row['mean']:.1f} ± {100 * row['standard_deviation']:.1f}" for row in found]
        assert rows["MiniLM itself" if name == "teacher" else name] == expected


def test_the_whole_job_of_the_readme_is_the_result_file():
    results = json.loads((ROOT / "recipes/benchmarks/results/whole_job.json").read_text())
    convert, train, push, load = (round(seconds) for seconds in results["seconds"].values())
    text = " ".join(README.split())
    assert f"takes {convert} s, {train} s and {push} s, and `pipeline(" in text
    assert f"trust_remote_code=True)` {load} s" in text


def test_the_table_of_the_papers_experiments_is_the_result_files():
    assert load_script("recipes/paper/table.py").table() in (ROOT / "recipes/paper/README.md").read_text()


def test_the_speed_table_of_the_readme_is_the_result_file():
    assert load_script("recipes/benchmarks/table.py").blocks_table() in README


def load_script(path):
    spec = importlib.util.spec_from_file_location("script", ROOT / path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def table_rows():
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in README.splitlines()]
