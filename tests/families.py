"""One tiny model of every family, with head counts that catch mistakes, and batches for it."""

import torch
import transformers

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 48,
    "vocab_size": 103,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**BASE, **IDS, "num_key_value_heads": 2, "head_dim": 12}  # head_dim is not hidden_size / heads
GPT = {"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 128, "vocab_size": 103, "initializer_range": 0.2}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **IDS}
VISION = {name: BASE[name] for name in BASE if name not in ("vocab_size", "max_position_embeddings")}
VISION |= {"image_size": 24, "patch_size": 4}
SPEECH = {**BASE, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0}
SPEECH |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "vocab_size": 103}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128}
BART |= {**IDS, "decoder_start_token_id": 2, "init_std": 0.2, "dropout": 0.0}
T5 = {"vocab_size": 103, "d_model": 64, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 8, "dropout_rate": 0.0}

# family: head of the model, its configuration, the layers to replace, the kind of its inputs
FAMILIES = {
    "Bert": ("ForMaskedLM", BASE, "last2", "text"),
    "Roberta": ("ForMaskedLM", {**BASE, "pad_token_id": 0}, "last2", "text"),
    "XLMRoberta": ("ForMaskedLM", {**BASE, "pad_token_id": 0}, "last2", "text"),
    "Camembert": ("ForMaskedLM", {**BASE, "pad_token_id": 0}, "last2", "text"),
    "Electra": ("ForMaskedLM", {**BASE, "embedding_size": 16}, "last2", "text"),
    "DistilBert": (
        "ForMaskedLM",
        {"dim": 64, "n_layers": 3, "n_heads": 8, "hidden_dim": 48, "vocab_size": 103, "initializer_range": 0.2}
        | {"dropout": 0.0, "attention_dropout": 0.0},
        "last2",
        "text",
    ),
    "ModernBert": (
        "ForMaskedLM",
        {**BASE, **IDS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 12, "num_hidden_layers": 4},
        "1-3",  # sliding, sliding, global
        "text",
    ),
    "Albert": ("ForMaskedLM", {**BASE, "embedding_size": 16}, "all", "text"),
    "CLIPText": ("Model", {**BASE, **IDS}, "last2", "text"),
    "GPT2": ("LMHeadModel", GPT, "last2", "text"),
    "GPTNeoX": ("ForCausalLM", {**BASE, **IDS}, "last2", "text"),
    "OPT": ("ForCausalLM", {**BASE, **IDS, "ffn_dim": 48, "word_embed_proj_dim": 64, "dropout": 0.0}, "last2", "text"),
    "Llama": ("ForCausalLM", {**GROUPED, "tie_word_embeddings": True}, "last2", "text"),
    "Mistral": ("ForCausalLM", {**GROUPED, "sliding_window": 9}, "last2", "text"),
    "Qwen2": ("ForCausalLM", GROUPED, "last2", "text"),
    "Qwen3": ("ForCausalLM", GROUPED, "last2", "text"),
    "Gemma": ("ForCausalLM", GROUPED, "last2", "text"),
    "Phi": ("ForCausalLM", {**BASE, **IDS, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "last2", "text"),
    "T5": ("ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, "1-2", "text"),
    "Bart": ("ForConditionalGeneration", BART, "1-2", "text"),  # one of the encoder, one of the decoder
    "ViT": ("ForImageClassification", VISION, "last2", "image"),
    "DeiT": ("ForImageClassification", VISION, "last2", "image"),
    "Wav2Vec2": ("ForCTC", SPEECH, "last2", "speech"),
    "DecisionTransformer": (
        "Model",
        {"state_dim": 5, "act_dim": 3, "hidden_size": 64, "max_ep_len": 64, **GPT},
        "last2",
        "episode",
    ),
}
SINCE = {"ModernBert": (5, 8), "T5": (5, 15), "Wav2Vec2": (5, 16)}  # the release that routes the family's attention
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
FAMILIES = {family: row for family, row in FAMILIES.items() if SINCE.get(family, (0, 0)) <= RELEASE}
CAUSAL = [
    name
    for name in FAMILIES
    if name in ("GPT2", "GPTNeoX", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi")
]


def make(family, dtype=torch.float32, **changes):
    """The tiny model of a family, in eval mode."""
    head, fields, *_ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**fields, **changes})
    return getattr(transformers, f"{family}{head}")(config).eval().to(dtype)


def batches(family, count=3, size=4, tokens=36, seed=0, padded=True):
    """Keyword arguments of the model's forward, with right padding where the family has any."""
    torch.manual_seed(seed)
    kind = FAMILIES[family][3]
    lengths = torch.tensor([tokens, tokens - 6, tokens - 11, tokens - 3] * size)[:size, None]
    mask = (torch.arange(tokens) < lengths).long()
    made = []
    for _ in range(count):
        if kind == "image":
            made.append({"pixel_values": torch.randn(size, 3, 24, 24)})
        elif kind == "speech":
            samples = 900
            frames = {"attention_mask": (torch.arange(samples) < samples * lengths // tokens).long()} if padded else {}
            made.append({"input_values": torch.randn(size, samples)} | frames)
        else:
            shown = {"attention_mask": mask} if padded else {}
            if kind == "text":
                made.append({"input_ids": torch.randint(3, 103, (size, tokens))} | shown)
            else:
                steps = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}
                tensors = {name: torch.randn(size, tokens, width) for name, width in steps.items()}
                made.append(tensors | {"timesteps": torch.arange(tokens).expand(size, -1)} | shown)
    return made


def loss_of(model, family, batch):
    """A training loss on one batch, by the model's own labels where it has them."""
    kind = FAMILIES[family][3]
    if kind == "episode":
        return model(**batch).action_preds.sub(batch["actions"]).square().mean()
    if kind == "image":
        return model(**batch, labels=torch.arange(len(batch["pixel_values"])) % 2).loss
    if kind == "speech":
        return model(**batch, labels=torch.tensor([[5, 7, 9]]).expand(len(batch["input_values"]), -1)).loss
    if family == "CLIPText":
        pooled = model(**batch).pooler_output
        return torch.nn.functional.cross_entropy(pooled, torch.arange(len(pooled)) % 2)
    return model(**batch, labels=batch["input_ids"]).loss
