"""What a Primal-Attention layer is made of: its options, their defaults, and which go together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrimalSettings:
    """What a Primal-Attention layer is made of; `None` means "the value that fits the rest".

    Args:
        rank: s, directions kept per head, >= 1; at most the feature dim for `fixed` weights.
        features: p, landmarks per head, >= 1 (None: 32). Only for the landmark map; the cosine map has p = d.
        window: half-width w in tokens of the exact softmax band, >= 0; 0 is no band (None: 16 where the
            read-out allows a band, else 0).
        feature_map: "landmark" (ours) or "cosine" (the paper's x / ||x||).
        weights: "fixed" (We, Wr in R^{p x s}) or "sampled" (the paper's data-dependent W_{e|X} = F^T We).
        readout: "values" (ours: the rank-s kernel weighs the values) or "scores" (the paper's W_o [e; r] + b).
        nonnegative: keep We, Wr >= 0, so that every kernel entry is positive (None: True for landmark).
        rank_multi: `sampled` weights use min(rank * rank_multi, N) evenly spaced rows, >= 1.
        official_sampling: `sampled` weights take their rows as the official code does, over the padded length, so that
            padding is sampled and short sequences repeat rows; else over the valid tokens, each once.
        shared_out_map: one W_o for all heads, as in the official code, instead of one per head.
        ksvd_weight: eta, the weight of the KSVD loss while training, >= 0; 0 switches it off. J^2 begins near 0 on
            text like the calibration's and at 0.2 to 25 on other text, so a larger weight can outweigh the task.

    Raises:
        ValueError: a value outside the above, or a combination that has no meaning.
    """

    rank: int = 16
    features: int | None = None
    window: int | None = None
    feature_map: str = "landmark"
    weights: str = "fixed"
    readout: str = "values"
    nonnegative: bool | None = None
    rank_multi: int = 10
    official_sampling: bool = False
    shared_out_map: bool = False
    ksvd_weight: float = 0.001

    def __post_init__(self) -> None:
        """Check, and fill in what was left open."""
        landmark = self.feature_map == "landmark"
        banded = self.readout == "values" and landmark and self.nonnegative is not False
        self._check_choices(landmark, banded)
        fitting = {"nonnegative": landmark, "features": 32 if landmark else None, "window": 16 if banded else 0}
        for name, value in fitting.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, least in (("rank", 1), ("features", 1), ("window", 0), ("rank_multi", 1), ("ksvd_weight", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.features is not None and self.rank > self.features:
            raise ValueError(f"rank must be 1..{self.features} (features), got {self.rank}")

    def _check_choices(self, landmark: bool, banded: bool) -> None:
        """Refuse words that are not known and choices that do not go together."""
        allowed = {
            "feature_map": ("landmark", "cosine"),
            "weights": ("fixed", "sampled"),
            "readout": ("values", "scores"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be {' or '.join(values)}, got {getattr(self, name)!r}")
        if not landmark and self.features is not None:
            raise ValueError("features is for feature_map landmark (cosine has as many as the head has dimensions)")
        if self.official_sampling and self.weights != "sampled":
            raise ValueError("official_sampling needs weights sampled")
        if self.weights == "sampled" and landmark:
            raise ValueError("weights sampled needs feature_map cosine")
        if self.nonnegative and not landmark:
            raise ValueError("nonnegative needs feature_map landmark (cosine features change sign)")
        if self.shared_out_map and self.readout != "scores":
            raise ValueError("shared_out_map needs readout scores")
        if self.window and not banded:
            raise ValueError(f"window {self.window} needs readout values and non-negative factors; use window 0")

    @classmethod
    def paper(cls, causal: bool = False, **changes: object) -> "PrimalSettings":
        """The paper's mechanism: cosine features, scores read-out (rank 20 of its grid).

        Sampled weights for encoders; fixed ones, on running means of q and k, for `causal` layers.
        """
        weights = "fixed" if causal else "sampled"
        own = {"rank": 20, "feature_map": "cosine", "weights": weights, "readout": "scores"}
        return cls(**{**own, **changes})  # type: ignore[arg-type]
