"""Which model families of the installed Transformers can be converted, read off its source files in seconds.

A reading, not a trial: no model is imported or built, and a composed model counts with every part that its config
names. The conversion itself checks the model again.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table
from transformers.models.auto import configuration_auto, modeling_auto

CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:(.*\n(?:[ \t].*\n|\n)*)", re.M)
DOCSTRING = re.compile(r'""".*?"""', re.S)
TABLE = re.compile(r"^(\w+) = \{([^{}]*)\}", re.M)  # GIT_SELF_ATTENTION_CLASSES: a layer takes its class from it
BUILT = re.compile(  # X(...), X[...](...), X._from_config(...), X if ... else X, {...: X,
    r"(?<!\w)(?:(?<=else )[A-Z]\w+|(?<=: )[A-Z]\w+(?=,\n)|[A-Z_]\w+(?=[\[(]| if |\._?from_config\())"
)
COMPOSED = re.compile(r"\bAutoModel\w*\.from_config\(|\bload_backbone\(")
PART = re.compile(r'model_type="([^"]+)"|\b([A-Z]\w+Config)\b')
RECORDED = re.compile(r"^    _can_record_outputs\b[^=\n]* = (None|\{.*\}|\{\n(?:.*\n)*?    \})", re.M)
READS = re.compile(r"^    (?:input_modalities|main_input_name)\b[^=\n]* = (.*)", re.M)
SENSES = {  # what a class declares that it reads
    "vision": "image|video|pixel",
    "speech": "audio|input_values|input_features",
    "time series": "time|past_values",
}
CONFIGS: dict[str, str] = dict(configuration_auto.CONFIG_MAPPING_NAMES)  # type: ignore[attr-defined]
TASKS = {  # what the names of the Auto classes that know a model type say of it; the first that matches
    "speech": "SPEECH|AUDIO|CTC|RNNT|TDT|WAVEFORM|SPECTROGRAM",
    "multimodal": "IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM",
    "vision": "IMAGE|VIDEO|BACKBONE",
    "encoder-decoder": "SEQ_TO_SEQ_CAUSAL_LM",
    "encoder": "MASKED_LM|TEXT_ENCODING",
    "decoder": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Family:
    """A model type of Transformers.

    Attributes:
        model_type: as in config.json, e.g. "bert".
        supported: whether its attention layers can be replaced.
        kind: "encoder", "decoder", "encoder-decoder", "vision", "speech", "time series" or "multimodal".
        reason: why it is not supported, a clause; "" if it is.
    """

    model_type: str
    supported: bool
    kind: str
    reason: str


@dataclass(frozen=True, eq=False)
class Source:
    """A class, or a table of classes, in a source file.

    Attributes:
        name: of the class.
        file: where it is.
        bases: names of the classes that it inherits from.
        text: its body.
    """

    name: str
    file: Path
    bases: tuple[str, ...]
    text: str


class Package:
    """The classes of all models, and how they inherit from and build each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.named: dict[str, list[Source]] = {}
        self.built: dict[Source, list[Source]] = {}
        for file in (path for pattern in ("modeling_*.py", "configuration_*.py") for path in folder.rglob(pattern)):
            text = file.read_text(encoding="utf-8")
            for name, bases, body in CLASS.findall(text):
                source = Source(name, file, tuple(re.findall(r"\w+", bases)), DOCSTRING.sub("", body))
                self.named.setdefault(name, []).append(source)
            for name, entries in TABLE.findall(text):
                source = Source(name, file, (), re.sub(r": (\w+)", r": \1()", entries))
                self.named.setdefault(name, []).append(source)

    def find(self, name: str, near: Path) -> Source | None:
        """The class of that name in the file or folder `near`, else the only one of that name."""
        known = self.named.get(name, [])
        close = [source for source in known if near in (source.file, source.file.parent)]
        return close[0] if close else known[0] if len(known) == 1 else None

    def home(self, model_type: str) -> Path:
        """Folder of the model type."""
        return self.folder / configuration_auto.model_type_to_module_name(model_type).replace(".", "/")

    def base_model(self, model_type: str) -> Source | None:
        """What AutoModel builds for the model type."""
        name = modeling_auto.MODEL_MAPPING_NAMES.get(model_type, "")
        return self.find(name if isinstance(name, str) else name[0], self.home(model_type))

    def lineage(self, source: Source | None) -> Iterator[Source]:
        """The class and those it inherits from, nearest first."""
        if source:
            yield source
            for name in source.bases:
                if name != source.name:
                    yield from self.lineage(self.find(name, source.file))

    def children(self, source: Source) -> list[Source]:
        """Classes that the class builds, itself or through what it inherits."""
        if source not in self.built:
            texts = [(ancestor.file, RECORDED.sub("", ancestor.text)) for ancestor in self.lineage(source)]
            found = {self.find(name, file) for file, text in texts for name in BUILT.findall(text)}
            self.built[source] = [child for child in found if child]
        return self.built[source]

    def tree(self, root: Source) -> set[Source]:
        """The class and every class that it builds at any depth."""
        seen, todo = {root}, [root]
        while todo:
            new = set(self.children(todo.pop())) - seen
            seen |= new
            todo += new
        return seen

    def recorded(self, owner: Source) -> set[str]:
        """Names of the classes that a PreTrainedModel records attentions from."""
        found = next((match for a in self.lineage(owner) if (match := RECORDED.search(a.text))), None)
        entries = ast.parse(found[1], mode="eval").body if found else None
        pairs = zip(entries.keys, entries.values, strict=True) if isinstance(entries, ast.Dict) else ()
        return {
            name
            for key, value in pairs
            if isinstance(key, ast.Constant) and key.value == "attentions"
            for name in class_names(value)
        }

    def attentions(self, root: Source) -> set[Source]:
        """The self-attention classes of a model, as `hf_primal.modeling.modeling_primal.self_attention_modules`."""
        found: set[Source] = set()
        for owner in self.tree(root):
            if targets := self.recorded(owner):
                found |= {s for s in self.tree(owner) if any(a.name in targets for a in self.lineage(s))}
        return found

    def is_routed(self, attention: Source) -> bool:
        """Whether the class, or one that it builds (T5LayerSelfAttention), asks for the attention interface."""
        for source in (attention, *self.children(attention)):
            methods = (m for a in self.lineage(source) for m in re.split(r"^    (?=def |@)", a.text, flags=re.M))
            if "get_interface(" in next((method for method in methods if method.startswith("def forward(")), ""):
                return True
        return False

    def models(self, model_type: str) -> dict[str, Source]:
        """Base model of the model type and, if it has AutoModel build models inside it, of those; by model type."""
        types = {config: key for key, config in CONFIGS.items()}
        found: dict[str, Source] = {}
        todo = [model_type]
        while todo:
            key = todo.pop()
            base = self.base_model(key)
            if base and key not in found:
                found[key] = base
                if any(COMPOSED.search(a.text) for source in self.tree(base) for a in self.lineage(source)):
                    config = self.find(CONFIGS[key], self.home(key))
                    named = [pair for ancestor in self.lineage(config) for pair in PART.findall(ancestor.text)]
                    todo += [part or types.get(part_config, "") for part, part_config in named]
        return found


def class_names(node: ast.expr) -> Iterator[str]:
    """Names of the classes in an entry of `_can_record_outputs`: a class, an OutputRecorder of one, or a list."""
    if isinstance(node, ast.List):
        for element in node.elts:
            yield from class_names(element)
    elif isinstance(node, ast.Call):
        for target in [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "target_class")]:
            yield from class_names(target)
    elif isinstance(node, ast.Name):
        yield node.id


def kind_of(package: Package, model_type: str) -> str:
    """What a model type reads and how, from its class and from the Auto classes that know it."""
    mappings = vars(modeling_auto).items()
    tasks = [name for name, known in mappings if re.fullmatch("MODEL_FOR_.*_NAMES", name) and model_type in known]
    kinds = [kind for kind, words in TASKS.items() if any(re.search(words, task) for task in tasks)]
    base = package.base_model(model_type)
    declared = " ".join(next((found for a in package.lineage(base) if (found := READS.findall(a.text))), []))
    senses = [sense for sense, words in SENSES.items() if re.search(words, declared)]
    if kinds[:1] in (["speech"], ["multimodal"]):
        return kinds[0]
    if len(senses) > 1 or (senses and "text" in declared):
        return "multimodal"
    causal = base and any(re.search(r"is_causal = (True|not )", source.text) for source in package.tree(base))
    return (senses or kinds or ["decoder" if causal else "encoder"])[0]


def reason_against(package: Package, model_type: str) -> str:
    """Why a model type cannot be converted, or "" if it can."""
    if "deprecated" in package.home(model_type).parts:
        return "it is deprecated in Transformers"
    models = package.models(model_type)
    if model_type not in models:
        return "its source is not found"
    attentions = {attention for base in models.values() for attention in package.attentions(base)}
    if apart := sorted({attention.name for attention in attentions if not package.is_routed(attention)}):
        return f"its attention ({', '.join(apart)}) does not go through the attention interface"
    named = any("Attention" in source.name for base in models.values() for source in package.tree(base))
    return "" if attentions else "no attention layers are recorded" if named else "it has no attention layers"


def list_families() -> list[Family]:
    """Every model type of the installed Transformers that has a base model, by name.

    A reading of the source, so that nothing is imported or built: the class that AutoModel gives, the attention
    classes that it and the models inside it record (`_can_record_outputs`), and whether the forward of each, or of a
    class that it builds, asks for the attention interface. The conversion itself checks the model again.
    """
    package = Package(Path(configuration_auto.__file__).parents[1])
    families = []
    for model_type in sorted(CONFIGS.keys() & modeling_auto.MODEL_MAPPING_NAMES.keys()):
        reason = reason_against(package, model_type)
        families.append(Family(model_type, not reason, kind_of(package, model_type), reason))
    return families


def show_families(as_json: bool = False) -> None:
    """Print the families that can be converted, by kind, and the others by reason."""
    families = list_families()
    if as_json:
        print(json.dumps([asdict(family) for family in families], indent=2))
        return
    supported = [family for family in families if family.supported]
    table = Table("kind", "families", title=f"{len(supported)} families whose attention can be replaced")
    for kind in sorted({family.kind for family in supported}):
        table.add_row(kind, ", ".join(family.model_type for family in supported if family.kind == kind))
    console = Console()
    console.print(table)
    others = Table("reason", "families", title=f"{len(families) - len(supported)} that cannot be converted")
    for reason in sorted({family.reason for family in families} - {""}):
        others.add_row(reason, ", ".join(family.model_type for family in families if family.reason == reason))
    console.print(others)
    console.print(
        f"Read off the source of transformers {transformers.__version__}. A conversion looks at the model itself: "
        "capped scores, attention sinks, and keys and values of different sizes are refused there."
    )
