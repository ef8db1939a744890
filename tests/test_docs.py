"""What is written is true: cards render, the README's options and numbers exist, imports go down only."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

import hf_primal
from hf_primal.convert.cli import build_parser
from hf_primal.convert.config import ConvertConfig
from hf_primal.model_cards import converted_card
from hf_primal.report import ConversionReport, Fidelity, Latency, LayerReport, break_even, write_plots

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LEVELS = ["modeling", "layers", "below", "convert", "recipes"]
BELOW = ("observe", "moments", "landmarks", "factors", "readout", "report", "initialise", "refine", "surgery")


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
                or imported in standard
                or re.fullmatch(r"\.\w+", imported)
            ), (path.name, imported)
        assert not re.search(r"^\s*from \. import", path.read_text(), re.M)  # not followed when files are copied


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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("base_model", ["user/base", None])
def test_cards_render_with_valid_front_matter_and_whole_links(tmp_path, variant, base_model):
    report = VARIANTS[variant]
    plots = write_plots(report, tmp_path)
    card = converted_card(report, "base-primal", "AutoModel", plots, base_model, "apache-2.0")
    _, front, body = card.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter["library_name"] == "transformers" and matter["license"] == "apache-2.0"
    assert matter.get("base_model") == base_model
    assert "{{" not in body and "{%" not in body and "None" not in body.replace("| None |", "")
    for link in re.findall(r"\]\(([^)]*)\)", body):
        assert link.startswith("https://") or (tmp_path / link).is_file(), link
    assert f"[user/base](https://huggingface.co/{base_model})" in body or base_model is None
    tables = [block for block in body.split("\n\n") if block.lstrip().startswith("|")]
    for table in tables:
        lines = [line for line in table.strip().splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1, table
    ast.parse(re.search(r"```python\n(.*?)```", body, re.S)[1])


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
        if len(cells) == 3 and cells[0] in results:
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
