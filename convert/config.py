"""What one run of the command does, as one frozen dataclass."""

from dataclasses import dataclass
from pathlib import Path

from hf_primal.convert.hub import check_name
from hf_primal.modeling.primal_settings import PrimalSettings

TASKS = {
    "backbone": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "pretraining": "AutoModelForPreTraining",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "ctc": "AutoModelForCTC",
}
DEMO_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class ConvertConfig:
    """The command's options, under their names; see `primal-convert --help`. `None` means "the preset's value"."""

    model: str
    base_model: str | None = None
    layers: str = "last4"
    output: Path | None = None
    calibration: str | None = None
    text_column: str | None = None
    samples: int = 300
    max_length: int = 192
    preset: str = "default"
    rank: int | None = None
    features: int | None = None
    window: int | None = None
    feature_map: str | None = None
    weights: str | None = None
    readout: str | None = None
    ksvd_weight: float | None = None
    refine_steps: int = 200
    fold: bool = False
    task: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int = 16
    memory: float = 2.0
    seed: int = 0
    overwrite: bool = False
    push_to_hub: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        """Check what no other part checks: ranges, and the name to push to.

        Raises:
            ValueError: a number below its least value, or a name that is none.
        """
        for name, least in (("samples", 1), ("max_length", 8), ("refine_steps", 0), ("batch_size", 1), ("memory", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(self, name)}")
        if self.push_to_hub is not None:
            check_name(self.push_to_hub)
        elif self.private:
            raise ValueError("--private is for --push-to-hub USER/NAME; give that too")

    def settings(self, causal: bool = False) -> PrimalSettings:
        """The preset with what was given on top.

        Args:
            causal: the layers are a decoder's, for which the paper has another form.

        Raises:
            ValueError: as `PrimalSettings`, naming the options as typed.
        """
        names = ("rank", "features", "window", "feature_map", "weights", "readout", "ksvd_weight")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return PrimalSettings.paper(causal, **given) if self.preset == "paper" else PrimalSettings(**given)

    @property
    def folder(self) -> Path:
        """Where the converted model goes: --output, or the model's last name with -primal in the current folder."""
        name = (self.base_model or self.model).rstrip("/\\").replace("\\", "/").split("/")[-1]
        return (self.output or Path(f"{name}-primal")).absolute()
