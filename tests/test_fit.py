"""The closed form: what the SVD recovers, the non-negative factors, the read-out, the objective, the edge cases."""

import copy
import dataclasses

import pytest
import torch

from hf_primal import PrimalAttention, PrimalSettings, factors
from hf_primal import moments as statistics
from hf_primal import readout as readouts
from hf_primal.landmarks import LandmarkSample, k_means, place_landmarks
from hf_primal.observe import States
from hf_primal.refine import output_error

HEADS, DIM = 2, 8


def make_states(batch=4, tokens=60, seed=0, spread=1.5, lengths=None):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (spread * torch.randn(batch, HEADS, tokens, DIM, generator=generator) for _ in range(3))
    valid = torch.arange(tokens) < torch.tensor(lengths or [tokens] * batch)[:, None]
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~valid[:, None, None], float("-inf"))
    return States(q, k, v, scores.softmax(-1) @ v, valid, DIM**-0.5)


def fitted(settings, states):
    """A layer after the whole closed form, its moments, its spectrum and its output error."""
    layer = PrimalAttention(HEADS, DIM, settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if settings.feature_map == "landmark":
            sample = LandmarkSample(layer, 500, generator)
            sample.update(states)
            place_landmarks(layer, sample)
        moments = (statistics.SlotMoments if settings.weights == "sampled" else statistics.Moments)(layer)
        moments.update(states)
        spectrum = factors.fit_factors(layer, moments)
        readout = readouts.Readout(layer)
        readout.update(states)
        error = readout.solve()
    return layer, moments, spectrum, error


SIGNED = PrimalSettings(rank=6, features=6, nonnegative=False)
FORMS = {
    "default": PrimalSettings(rank=4, features=6, window=4),
    "no band": PrimalSettings(rank=4, features=6, window=0),
    "signed": SIGNED,
    "cosine": PrimalSettings(rank=4, feature_map="cosine", readout="scores"),
    "paper": PrimalSettings.paper(rank=4, rank_multi=5),
}


def test_full_rank_recovers_the_observed_kernel():
    layer, moments, *_ = fitted(SIGNED, make_states())
    rebuilt = moments.gram_q @ layer.We.double() @ layer.Wr.double().mT @ moments.gram_k / moments.pairs
    torch.testing.assert_close(rebuilt, moments.cross, rtol=1e-3, atol=1e-4 * float(moments.cross.abs().max()))


def test_a_planted_low_rank_kernel_is_recovered_at_its_rank():
    _, moments, *_ = fitted(SIGNED, make_states())
    planted = [torch.rand(HEADS, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    kernel = planted[0] @ planted[1].mT
    moments.cross = moments.gram_q @ kernel @ moments.gram_k / moments.pairs

    We, Wr, values = factors.singular_factors(moments, 2)
    nonnegative = factors.nonnegative_factors(moments, We, Wr)

    torch.testing.assert_close(We @ Wr.mT, kernel, rtol=1e-5, atol=1e-7)
    assert (values[:, 2:] < 1e-6 * values[:, :1]).all()
    assert all((factor >= 0).all() for factor in nonnegative)
    assert (nonnegative[0] @ nonnegative[1].mT - kernel).norm() < 0.05 * kernel.norm()


def test_more_updates_never_raise_the_error_of_the_nonnegative_factors(monkeypatch):
    _, moments, *_ = fitted(FORMS["no band"], make_states())
    signed = factors.singular_factors(moments, 4)[:2]
    gram_q, gram_k, cross = (x / moments.pairs for x in (moments.gram_q, moments.gram_k, moments.cross))
    errors = []
    for updates in (0, 1, 5, 50, 300):
        monkeypatch.setattr(factors, "UPDATES", updates)
        We, Wr = factors.nonnegative_factors(moments, *signed)
        kernel = We @ Wr.mT
        errors.append(float((kernel * (gram_q @ kernel @ gram_k - 2 * cross)).sum()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_objective_is_zero_on_the_calibration_tokens(form):
    states = make_states(lengths=[60, 50, 33, 20])
    layer = fitted(FORMS[form], states)[0].train()
    layer(states.query, states.key, states.value, states.valid, states.scaling)
    assert abs(layer.last.item()) < 1e-4
    with torch.no_grad():
        layer.Lambda.mul_(1.1)
    layer(states.query, states.key, states.value, states.valid, states.scaling)
    assert abs(layer.last.item()) > 1e-2


def test_sequences_inside_the_band_have_no_objective_and_longer_ones_their_share_of_it():
    layer, states = fitted(FORMS["default"], make_states())[0].train(), make_states(seed=1)
    scores = layer.context_and_scores(states.query, states.key, states.value)[1]
    no_band = copy.deepcopy(layer)
    no_band.settings = dataclasses.replace(layer.settings, window=0)
    for tokens, share in ((1, 0.0), (4, 0.0), (5, 0.04), (8, 0.25), (60, (56 / 60) ** 2)):
        cut = scores[:, :, :tokens]
        torch.testing.assert_close(layer.objectives(cut)[0], share * no_band.objectives(cut)[0])


def test_calibration_inside_the_band_leaves_an_objective_that_is_finite():
    layer, short = fitted(FORMS["default"], make_states())[0], make_states(tokens=4)
    readout = readouts.Readout(layer)
    readout.update(short)
    readout.solve()
    assert layer.Lambda.isfinite().all() and layer.Lambda.max() < 100


def test_the_svd_solution_is_stationary_for_the_objective():
    """Lemma 4.2 and the KKT conditions: with the coupling, dJ/dWe and dJ/dWr vanish at the signed SVD solution."""
    states = make_states()
    layer = fitted(PrimalSettings(rank=3, features=6, nonnegative=False), states)[0].double().train()
    layer(*(x.double() for x in (states.query, states.key, states.value)), states.valid, states.scaling)
    layer.last.backward()
    for factor in (layer.We, layer.Wr):
        assert factor.grad.norm() * factor.norm() < 1e-3


def test_the_coupling_is_a_generalised_inverse():
    layer, *_ = fitted(FORMS["default"], make_states())
    We, Wr = (w.abs().double() for w in (layer.We, layer.Wr))
    torch.testing.assert_close(
        We.mT @ layer.coupling.double() @ Wr, torch.eye(4).expand(2, 4, 4).double(), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_reported_error_is_the_error_of_the_layer(form):
    states = make_states(lengths=[60, 50, 33, 20])
    layer, *_, error = fitted(FORMS[form], states)
    assert float(output_error(layer.eval(), [states]).detach()) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_the_spectrum_is_a_part_of_what_was_observed(form):
    _, _, spectrum, _ = fitted(FORMS[form], make_states())
    assert (spectrum >= 0).all() and spectrum.sum() <= 1.001
    assert spectrum.tolist() == sorted(spectrum.tolist(), reverse=True)


def test_an_attention_that_the_features_span_comes_back():
    """Queries and keys that take four values, each its own landmark: the signed factors are exact at full rank."""
    generator = torch.Generator().manual_seed(0)
    pick = torch.randint(0, 4, (4, 60), generator=generator)
    q, k = (torch.randn(HEADS, 4, DIM, generator=generator)[:, pick].transpose(0, 1) for _ in range(2))
    v = torch.randn(4, HEADS, 60, DIM, generator=generator)
    states = States(q, k, v, (q @ k.mT * DIM**-0.5).softmax(-1) @ v, torch.ones(4, 60, dtype=torch.bool), DIM**-0.5)
    *_, signed = fitted(PrimalSettings(rank=8, features=8, nonnegative=False), states)
    *_, nonnegative = fitted(PrimalSettings(rank=8, features=8, window=0), states)
    assert signed < 1e-3
    assert nonnegative < 0.05


def test_the_order_and_split_of_the_data_do_not_matter():
    states = make_states()
    whole, halves = (statistics.Moments(fitted(FORMS["default"], states)[0]) for _ in range(2))
    with torch.no_grad():
        whole.update(states)
        for part in (slice(2, 4), slice(0, 2)):
            tensors = (states.query, states.key, states.value, states.output, states.valid)
            halves.update(States(*(x[part] for x in tensors), states.scaling))
    for name in ("cross", "gram_q", "gram_k", "energy"):
        torch.testing.assert_close(getattr(whole, name), getattr(halves, name), rtol=1e-5, atol=1e-5)


def test_rows_of_attention_are_chunked_without_effect(monkeypatch):
    states, layer = make_states(), fitted(FORMS["default"], make_states())[0]
    results = []
    for entries in (1, 7 * 4 * 2 * 60, 2**24):
        monkeypatch.setattr(statistics, "CHUNK", entries)
        moments = statistics.Moments(layer)
        with torch.no_grad():
            moments.update(states)
        results.append(moments.cross)
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_padding_does_not_reach_the_statistics(form):
    states = make_states(lengths=[60, 40, 30, 25])
    hidden = ~states.valid[:, None, :, None]
    garbage = [x.masked_fill(hidden, 77.0) for x in (states.query, states.key, states.value, states.output)]
    clean, dirty = (fitted(FORMS[form], s)[0] for s in (states, States(*garbage, states.valid, states.scaling)))
    for name, tensor in clean.state_dict().items():
        torch.testing.assert_close(tensor, dirty.state_dict()[name], msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["one repeated token", "fewer tokens than landmarks", "constant values"])
def test_degenerate_data_gives_a_finite_layer(form, case):
    states = {
        "one repeated token": make_states(batch=1, tokens=30, spread=0.0),
        "fewer tokens than landmarks": make_states(batch=1, tokens=5),
        "constant values": make_states(spread=1e-8),
    }[case]
    layer, *_, error = fitted(FORMS[form], states)
    assert all(tensor.isfinite().all() for tensor in layer.state_dict().values())
    assert layer(states.query, states.key, states.value, states.valid).isfinite().all()
    assert 0 <= error <= 1


def test_passages_inside_the_window_are_refused_by_name():
    with pytest.raises(ValueError, match="shorter than the window of 16 tokens"):
        fitted(PrimalSettings(rank=4, features=6, window=16), make_states(tokens=10))


def test_an_svd_that_does_not_converge_falls_back_and_says_so(monkeypatch):
    matrix = torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.svd(matrix)

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fail)
    with pytest.warns(UserWarning, match="did not converge"):
        U, S, V = factors.truncated_svd(matrix)
    torch.testing.assert_close(S, expected.S, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(U @ torch.diag_embed(S) @ V.mT, matrix, rtol=1e-6, atol=1e-6)


def test_k_means_finds_separated_clusters():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = centres.repeat(50, 1)[None] + 0.01 * torch.randn(1, 150, 2, generator=torch.Generator().manual_seed(0))
    for seed in range(20):
        found = k_means(points, 3, torch.Generator().manual_seed(seed))
        assert float(torch.cdist(found[0], centres).min(0).values.max()) < 0.1
