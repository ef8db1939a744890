"""Generation: cached equals uncached, the state does not grow, and it reorders, repeats and rolls back."""

import copy
import inspect

import pytest
import torch
from families import CAUSAL, FAMILIES, batches
from test_families import converted_of, latency_at_one_short_length  # noqa: F401
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.generation import CompileConfig

from hf_primal.modeling.cache_primal import PrimalState, state_bytes

WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "beams, static cache": {"num_beams": 3, "do_sample": False, "cache_implementation": "static"},
}


def prompt(left=(7, 0, 3), tokens=30):
    """Ids and mask of a batch with left padding."""
    ids = batches("Llama", tokens=tokens)[0]["input_ids"][: len(left)]
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) >= torch.tensor(left)[:, None]).long()}


def generate(model, inputs, **options):
    torch.manual_seed(1)
    length = {"max_new_tokens": 14, "min_new_tokens": 14}
    return model.generate(**inputs, **length, pad_token_id=0, repetition_penalty=1.5, **options)


def cache_of(output):
    """The cache, under the name that this release of Transformers gives it."""
    return output["cache" if "cache" in output else "past_key_values"]


def with_cache(cache):
    known = inspect.signature(LlamaForCausalLM.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CAUSAL)
def test_generating_with_a_cache_equals_generating_without(family, way):
    _, converted, _ = converted_of(family)
    options = {name: value for name, value in WAYS[way].items() if name != "cache_implementation"}
    expected = generate(converted, prompt(), use_cache=False, **options)
    assert torch.equal(generate(converted, prompt(), **WAYS[way]), expected)
    assert expected.shape == (3, 44) and len(expected[:, 30:].unique()) > 3


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("family", [family for family in ("Bart", "T5") if family in FAMILIES])
def test_encoder_decoders_generate_the_same_with_and_without_cache(family, way):
    _, converted, _ = converted_of(family)
    expected = generate(converted, prompt((0, 0, 0)), use_cache=False, **WAYS[way])
    assert torch.equal(generate(converted, prompt((0, 0, 0)), **WAYS[way]), expected)


def test_the_state_is_reported_and_does_not_grow():
    _, converted, _ = converted_of("Llama")
    ids, sizes, plain = batches("Llama", tokens=110)[0]["input_ids"], [], []
    for tokens in (5, 40, 110):
        with torch.no_grad():
            cache = cache_of(converted(input_ids=ids[:, :tokens], use_cache=True))
        held = [isinstance(layer, PrimalState) for layer in cache.layers]
        assert held == [False, True, True] and cache.get_seq_length() == tokens
        sizes.append([state_bytes(layer) for layer in cache.layers[1:]])
        plain.append(state_bytes(cache.layers[0]))
        assert f"{sizes[-1][0]} bytes for {tokens} tokens" in repr(cache)
        assert state_bytes(cache) == plain[-1] + sum(sizes[-1])
    assert sizes[0] == sizes[1] == sizes[2] and plain[0] < plain[1] < plain[2]


@pytest.mark.parametrize("make_cache", [lambda config: DynamicCache(), lambda config: DynamicCache(config=config)])
@pytest.mark.parametrize("pieces", [[20, 1, 1, 8], [1, 29], [10, 10, 10]])
def test_a_prompt_in_pieces_through_a_cache_of_the_users_equals_at_once(make_cache, pieces):
    for family in ("Llama", "Mistral"):
        _, converted, _ = converted_of(family)
        inputs, cache, found = prompt(), make_cache(converted.config), []
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = converted(**inputs, position_ids=positions).logits
            for part in torch.arange(30).split(pieces):
                shown = inputs["attention_mask"][:, : part[-1] + 1]
                step = {"input_ids": inputs["input_ids"][:, part], "attention_mask": shown}
                found.append(
                    converted(**step, position_ids=positions[:, part], use_cache=True, **with_cache(cache)).logits
                )
        mask = inputs["attention_mask"].bool()
        torch.testing.assert_close(torch.cat(found, 1)[mask], expected[mask], atol=1e-4, rtol=1e-4)


def test_a_compiled_generation_is_the_uncompiled_one():
    _, converted, _ = converted_of("Llama")
    converted = copy.deepcopy(converted)
    expected = generate(converted, prompt(), do_sample=False)
    compiling = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False, mode=None)
    compiling._compile_all_devices = True
    found = generate(converted, prompt(), do_sample=False, cache_implementation="static", compile_config=compiling)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not hasattr(DynamicCache, "activate_past_recording"), reason="this release cannot take tokens back")
def test_assisted_decoding_gives_the_same_tokens_in_either_role():
    teacher, converted, _ = converted_of("Llama")
    inputs = prompt(left=(0,))
    for model, assistant in ((converted, teacher), (teacher, converted), (converted, converted)):
        expected = generate(model, inputs, do_sample=False)
        assert torch.equal(generate(model, inputs, do_sample=False, assistant_model=assistant), expected)


@pytest.mark.skipif(not hasattr(DynamicCache, "activate_past_recording"), reason="this release cannot take tokens back")
@pytest.mark.parametrize("removed", [0, 1, 3, 7])
def test_taking_tokens_back_leaves_no_trace(removed):
    _, converted, _ = converted_of("Llama")
    ids = batches("Llama")[0]["input_ids"][:, :30]
    caches = [DynamicCache(config=converted.config) for _ in range(2)]
    with torch.no_grad():
        for cache, parts in zip(caches, ([(0, 20), (20, 26), (26, 30)], [(0, 30 - removed)]), strict=True):
            for begin, end in parts:
                if begin == 20:
                    cache.activate_past_recording()
                converted(input_ids=ids[:, begin:end], use_cache=True, **with_cache(cache))
        caches[0].crop(-removed)
        logits = [converted(input_ids=ids[:, 3:9], use_cache=True, **with_cache(cache)).logits for cache in caches]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 36 - removed


def test_going_back_further_than_was_recorded_is_refused():
    _, converted, _ = converted_of("Llama")
    with torch.no_grad():
        cache = cache_of(converted(**batches("Llama", padded=False)[0], use_cache=True))
    with pytest.raises(RuntimeError, match="goes back further than the recorded calls"):
        cache.crop(-2)


def test_the_state_follows_its_sequences():
    _, converted, _ = converted_of("Llama")
    ids = batches("Llama")[0]["input_ids"]
    moves = {
        "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0, 3])), [2, 0, 0, 3]),
        "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1]),
    }
    for name, (move, rows) in moves.items():
        with torch.no_grad():
            cache = cache_of(converted(input_ids=ids[:, :20], use_cache=True))
            move(cache)
            found = converted(input_ids=ids[rows][:, 20:], use_cache=True, **with_cache(cache)).logits
            expected = converted(input_ids=ids[rows]).logits[:, 20:]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=name)
    cache.reset()
    assert cache.layers[2].state == {} and cache.layers[2].get_seq_length() == 0


def test_caches_that_cannot_be_served_are_refused():
    teacher, converted, _ = converted_of("Llama")
    ids = batches("Llama")[0]["input_ids"]
    used = cache_of(teacher(input_ids=ids, use_cache=True))
    with pytest.raises(ValueError, match="holds its keys of 36 tokens already; start from an empty cache"):
        converted(input_ids=ids[:, :1], use_cache=True, **with_cache(used))
    strange = DynamicCache()
    strange.layers = [type("OtherLayer", (), {"is_initialized": False})() for _ in range(3)]
    strange.layers[0] = DynamicCache(config=converted.config).layers[0]
    with pytest.raises(ValueError, match="cannot generate with a OtherLayer"):
        converted(input_ids=ids, use_cache=True, **with_cache(strange))


def test_training_through_a_cache_has_the_gradients_of_training_without():
    _, converted, _ = converted_of("Llama")
    converted = copy.deepcopy(converted)
    ids = batches("Llama")[0]["input_ids"]
    gradients = []
    for pieces in ([36], [20, 16]):
        converted.zero_grad()
        cache, loss = DynamicCache(config=converted.config), 0.0
        for part in torch.arange(36).split(pieces):
            loss = loss + converted(input_ids=ids[:, part], use_cache=True, **with_cache(cache)).logits.square().sum()
        loss.backward()
        gradients.append(converted.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=1e-2, rtol=1e-3)


def test_a_static_cache_keeps_its_addresses():
    _, converted, _ = converted_of("Llama")
    ids = batches("Llama")[0]["input_ids"]
    cache = StaticCache(config=converted.config, max_cache_len=40)
    with torch.no_grad():
        converted(input_ids=ids[:, :20], use_cache=True, **with_cache(cache))
        before = {name: tensor.data_ptr() for name, tensor in cache.layers[2].state.items()}
        converted(input_ids=ids[:, 20:21], use_cache=True, **with_cache(cache))
    assert before == {name: tensor.data_ptr() for name, tensor in cache.layers[2].state.items()}
