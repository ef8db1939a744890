"""The paper: the layer against a reference written from its equations, and its theory as identities anyone can read."""

import itertools

import pytest
import torch
import transformers

import hf_primal
from hf_primal import PrimalAttention, PrimalSettings, ksvd

BATCH, HEADS, DIM, RANK = 2, 2, 6, 3
EXACT = {"rtol": 1e-10, "atol": 1e-10}
FORMS = {
    "data-dependent": PrimalSettings.paper(rank=RANK, rank_multi=4),
    "data-dependent, shared out map": PrimalSettings.paper(rank=RANK, rank_multi=4, shared_out_map=True),
    "data-dependent, official sampling": PrimalSettings.paper(rank=RANK, rank_multi=4, official_sampling=True),
    "data-independent": PrimalSettings.paper(rank=RANK, weights="fixed"),
    "causal": PrimalSettings.paper(causal=True, rank=RANK),
}


def make(settings):
    torch.manual_seed(0)
    layer = PrimalAttention(HEADS, DIM, settings)
    layer.load_state_dict({name: value.clone() for name, value in layer.initial_values().items()})
    return layer.double().train()


def positions(tokens, slots, official):
    """Token and slot of n = min(slots, N) evenly spaced rows, fewer spread over the slots; official ones repeat."""
    if official:
        return [(int(token), slot) for slot, token in enumerate(torch.linspace(0, tokens - 1, slots, dtype=int))]
    if tokens >= slots:
        return [(round_half_up(i * (tokens - 1), slots - 1), i) for i in range(slots)]
    return [(j, round_half_up(j * (slots - 1), tokens - 1)) for j in range(tokens)]


def round_half_up(numerator, denominator):
    return 0 if denominator == 0 else (2 * numerator + denominator) // (2 * denominator)


def reference(layer, q, k, v, causal):
    """One token, head and direction at a time: e, r, output and J of every sequence (equations 6, 9 and 10)."""
    tokens, rows, objectives = q.shape[2], [], []
    for b, h in itertools.product(range(BATCH), range(HEADS)):
        We, Wr, out = layer.We[h], layer.Wr[h], 0 if layer.settings.shared_out_map else h
        objective = -torch.trace(We.T @ Wr)
        if layer.settings.weights == "sampled":
            F = torch.zeros(len(We), DIM, dtype=torch.float64)  # f(X); rows that no token fills stay zero
            for token, slot in positions(tokens, len(We), layer.settings.official_sampling):
                F = F.index_put((torch.tensor(slot),), v[b, h, token])
            We, Wr = F.T @ We, F.T @ Wr
        for i in range(tokens):
            seen_q, seen_k = (x[b, h, : i + 1].sum(0) if causal else x[b, h, i] for x in (q, k))
            e, r = We.T @ (seen_q / seen_q.norm()), Wr.T @ (seen_k / seen_k.norm())
            output = torch.cat((e, r)) @ layer.out_map[out] + layer.out_bias[out, 0]
            for score in (e, r):
                objective = objective + ((layer.Lambda[h] * score) ** 2).sum() / (2 * tokens)
            rows.append((torch.cat((e, r)), output))
        objectives.append(objective)
    scores, output = (torch.stack(x).view(BATCH, HEADS, tokens, -1) for x in zip(*rows, strict=True))
    return scores, output.transpose(1, 2), torch.stack(objectives).view(BATCH, HEADS).mean(-1)


@pytest.mark.parametrize("tokens", [30, 12, 5, 1])  # above, at and below the sample count of 12
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_papers_forward_and_backward(form, tokens):
    layer, causal = make(FORMS[form]), form == "causal"
    inputs = [torch.randn(BATCH, HEADS, tokens, DIM, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    scores = layer.context_and_scores(*inputs, causal=causal)[1]
    output, objective = layer(*inputs, causal=causal), layer.objectives(scores)[0]
    expected_scores, expected_output, expected_objective = reference(layer, *inputs, causal)
    torch.testing.assert_close(scores, expected_scores, **EXACT)
    torch.testing.assert_close(output, expected_output, **EXACT)
    torch.testing.assert_close(objective, expected_objective, **EXACT)

    weight = torch.randn(output.shape, dtype=torch.float64)
    wanted = [*inputs, *layer.parameters()]
    pairs = ((output, objective), (expected_output, expected_objective))
    losses = [(o * weight).sum() + j.square().mean() for o, j in pairs]
    found = [torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True) for loss in losses]
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **EXACT)


def test_official_sampling_meets_padding_and_ours_does_not():
    valid = torch.arange(30) < torch.tensor([[30], [17]])
    inputs = [torch.randn(BATCH, HEADS, 30, DIM, dtype=torch.float64) for _ in range(3)]
    for form, changes in (("data-dependent", False), ("data-dependent, official sampling", True)):
        layer = make(FORMS[form])
        outputs = [layer(*(x[1:, :, :n] for x in inputs), valid[1:, :n])[:, :17] for n in (17, 30)]
        assert torch.allclose(*outputs) != changes


def problem(data_dependent, queries=9, keys=7, p=5, n=6):
    """Features, F and the kernel that they make, two heads of it."""
    torch.manual_seed(0)
    phi_q, phi_k = (torch.randn(2, size, p, dtype=torch.float64) for size in (queries, keys))
    F = torch.randn(2, n, p, dtype=torch.float64) if data_dependent else None
    inner = torch.eye(p, dtype=torch.float64) if F is None else F.mT @ F
    return phi_q, phi_k, F, phi_q @ inner @ phi_k.mT


def solved(data_dependent, rank=3):
    phi_q, phi_k, F, kernel = problem(data_dependent)
    solution = ksvd.kernel_svd(kernel, rank)
    We, Wr = ksvd.primal_weights(phi_q, phi_k, solution, F)
    e, r = ksvd.primal_scores(phi_q, We, F), ksvd.primal_scores(phi_k, Wr, F)
    return phi_q, phi_k, F, kernel, solution, We, Wr, e, r


@pytest.mark.parametrize("data_dependent", [False, True])
def test_primal_and_dual_agree_on_the_data_and_on_new_points(data_dependent):
    phi_q, phi_k, F, kernel, solution, We, _, e, r = solved(data_dependent)
    torch.testing.assert_close(e, ksvd.dual_scores(kernel, solution.H_r), **EXACT)
    torch.testing.assert_close(r, ksvd.dual_scores(kernel.mT, solution.H_e), **EXACT)
    torch.testing.assert_close(e, solution.H_e * solution.sigma.unsqueeze(-2), **EXACT)  # K H_r = H_e Sigma
    torch.testing.assert_close(r, solution.H_r * solution.sigma.unsqueeze(-2), **EXACT)
    new = torch.randn(2, 4, phi_q.shape[-1], dtype=torch.float64)
    inner = torch.eye(new.shape[-1], dtype=torch.float64) if F is None else F.mT @ F
    dual = ksvd.dual_scores(new @ inner @ phi_k.mT, solution.H_r)
    torch.testing.assert_close(ksvd.primal_scores(new, We, F), dual, **EXACT)


@pytest.mark.parametrize("data_dependent", [False, True])
def test_the_solution_meets_the_kkt_conditions(data_dependent):
    """Lambda e_i = h_ei and Lambda r_j = h_rj, and the derivatives of the reduced objective by We and Wr vanish."""
    phi_q, phi_k, F, _, solution, We, Wr, e, r = solved(data_dependent)
    Lambda = 1 / solution.sigma
    torch.testing.assert_close(e * Lambda.unsqueeze(-2), solution.H_e, **EXACT)
    torch.testing.assert_close(r * Lambda.unsqueeze(-2), solution.H_r, **EXACT)
    We, Wr = We.clone().requires_grad_(), Wr.clone().requires_grad_()
    J = ksvd.objective(ksvd.primal_scores(phi_q, We, F), ksvd.primal_scores(phi_k, Wr, F), We, Wr, Lambda).sum()
    for gradient in torch.autograd.grad(J, (We, Wr)):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


@pytest.mark.parametrize("data_dependent", [False, True])
def test_the_objective_is_zero_at_the_solution_and_not_beside_it(data_dependent):
    """Lemma 4.2."""
    phi_q, _, F, _, solution, We, Wr, e, r = solved(data_dependent)
    J = ksvd.objective(e, r, We, Wr, 1 / solution.sigma)
    torch.testing.assert_close(J, torch.zeros_like(J), rtol=0, atol=1e-9)
    moved = We + 0.1 * torch.randn_like(We)
    J = ksvd.objective(ksvd.primal_scores(phi_q, moved, F), r, moved, Wr, 1 / solution.sigma)
    assert (J.abs() > 1e-3).all()


def angle(basis, other):
    """The largest angle between two column spaces, in degrees, mean over heads."""
    first, second = (torch.linalg.qr(x)[0] for x in (basis, other))
    cosine = torch.linalg.svdvals(first.mT @ second)[..., -1].clamp(max=1)
    return float(torch.rad2deg(torch.arccos(cosine)).mean())


def minimise(start, with_constraint):
    """We and Wr by gradient descent on J^2, alone or with the KKT residuals that it leaves out, Lambda fixed."""
    phi_q, phi_k, _, kernel, solution, *_ = solved(False)
    size = kernel.square().sum().sqrt()
    We, Wr = (x.clone().requires_grad_() for x in start)
    optimiser = torch.optim.LBFGS((We, Wr), max_iter=3000, tolerance_grad=1e-12, tolerance_change=1e-16)

    def closure():
        optimiser.zero_grad()
        e, r = ksvd.primal_scores(phi_q, We), ksvd.primal_scores(phi_k, Wr)
        loss = ksvd.objective(e, r, We, Wr, 1 / solution.sigma).square().sum()
        if with_constraint:
            scale = solution.sigma.unsqueeze(-2)
            loss = loss + (We - phi_k.mT @ (r / scale)).square().sum() + (Wr - phi_q.mT @ (e / scale)).square().sum()
        loss.backward()
        return loss

    loss = optimiser.step(closure)
    for _ in range(20):
        loss = optimiser.step(closure)
    e = ksvd.primal_scores(phi_q, We).detach()
    return float(loss.detach() / size), e, angle(e, solution.H_e)


def test_the_loss_alone_does_not_determine_the_singular_vectors():
    """J^2 = 0 at a point whose scores are far from the singular subspace; with the KKT conditions it is found."""
    torch.manual_seed(1)
    *_, We, Wr, _, _ = solved(False)
    near = [x + 0.05 * torch.randn_like(x) for x in (We, Wr)]
    far = [torch.randn_like(x) for x in (We, Wr)]
    loss, e, degrees = minimise(far, with_constraint=False)
    assert loss < 1e-10 and e.norm() > 0.1 and degrees > 20
    loss, _, degrees = minimise(near, with_constraint=True)
    assert loss < 1e-10 and degrees < 0.1


def test_attention_is_a_kernel_whose_truncation_error_is_its_tail():
    torch.manual_seed(0)
    q, k = (torch.randn(2, 20, 8, dtype=torch.float64) for _ in range(2))
    kernel = ksvd.attention_kernel(q, k)
    torch.testing.assert_close(kernel.sum(-1), torch.ones(2, 20, dtype=torch.float64))
    causal = ksvd.attention_kernel(q, k, causal=True)
    assert (causal.triu(1) == 0).all()
    energies = []
    for rank in (1, 5, 20):
        found = ksvd.kernel_svd(kernel, rank)
        rest = kernel - found.H_e * found.sigma.unsqueeze(-2) @ found.H_r.mT
        missed = rest.square().sum((-2, -1)) / kernel.square().sum((-2, -1))
        torch.testing.assert_close(1 - missed, found.energy, rtol=1e-8, atol=1e-8)
        energies.append(found.energy)
    assert all((a < b).all() for a, b in itertools.pairwise(energies))


@pytest.mark.parametrize("rank", [0, 8])
def test_a_rank_out_of_range_is_refused(rank):
    with pytest.raises(ValueError, match=r"rank must be 1\.\.7, got"):
        ksvd.kernel_svd(torch.randn(9, 7), rank)


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
FROM_SCRATCH = {
    "AutoModelForSequenceClassification": ("PrimalBertConfig", {**SMALL, "vocab_size": 10}),
    "AutoModelForImageClassification": ("PrimalViTConfig", {**SMALL, "image_size": 4, "patch_size": 1}),
    "AutoModelForCausalLM": ("PrimalGPT2Config", {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 10}),
    "AutoModel": ("PrimalDecisionTransformerConfig", {"hidden_size": 16, "n_head": 2, "n_layer": 2}),
}


@pytest.mark.parametrize("auto", FROM_SCRATCH)
def test_a_model_from_scratch_is_a_configuration_that_trains_saves_and_reloads(auto, tmp_path):
    torch.manual_seed(0)
    name, fields = FROM_SCRATCH[auto]
    causal = name in ("PrimalGPT2Config", "PrimalDecisionTransformerConfig")
    settings = PrimalSettings.paper(causal=causal, rank=3)
    config = getattr(hf_primal, name)(primal_layers=[1], primal=vars(settings), ksvd_weight=0.1, **fields)
    model = getattr(transformers, auto).from_config(config).train()
    inputs = {
        "AutoModelForImageClassification": lambda: {"pixel_values": torch.randn(2, 3, 4, 4)},
        "AutoModel": lambda: episode(config),
    }.get(auto, lambda: {"input_ids": torch.randint(10, (2, 7))})()
    model.expects_labels = False
    model(**inputs)
    model.last_losses["loss_ksvd"].backward()
    (primal,) = (module for module in model.modules() if isinstance(module, PrimalAttention))
    assert primal.Lambda.grad.abs().sum() > 0

    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(**inputs)[0], model.eval()(**inputs)[0])


def episode(config):
    return {
        "states": torch.randn(2, 5, config.state_dim),
        "actions": torch.randn(2, 5, config.act_dim),
        "rewards": torch.randn(2, 5, 1),
        "returns_to_go": torch.randn(2, 5, 1),
        "timesteps": torch.arange(5).expand(2, -1),
    }
