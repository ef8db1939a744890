"""Model cards: templates for converted and for fine-tuned models, and how they are filled in."""

from hf_primal.model_cards.converted import converted_card
from hf_primal.model_cards.finetuned import FineTuning, finetuned_card

__all__ = ["FineTuning", "converted_card", "finetuned_card"]
