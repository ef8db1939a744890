"""What `primal_band.banded` gives, in fused kernels for NVIDIA GPUs, where Triton is installed.

Letters: B batch, H query heads, G key/value heads, N queries, M >= N keys, d head dim, s rank, w window, C chunk.
A program takes C rows of a head and streams the keys of their window through the chip, so that no weight is ever
written to memory; the sums of r v^T beyond the windows, small as they are, stay with torch and its autograd.
Kernels work in float32 throughout. Inputs in half precision have no more bits than TF32 keeps, whose range is that of
float32, so their products go to the tensor cores.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
except ImportError:
    triton, constexpr, tensor = None, Any, Any

LEAST = 16  # of every side of a matrix product
LARGEST_DIM, LARGEST_RANK = 128, 64  # what fits on the chip
PRECISION = "ieee"  # of products of float32 inputs, as torch has it by default


def usable(q: Tensor, v: Tensor, e: Tensor, window: int, bias: Tensor | None) -> bool:
    """Whether `fused` takes what `banded` was given.

    Not without Triton or a band, not elsewhere than on NVIDIA GPUs that have TF32, not in float64, and not where the
    bias needs a gradient, which the kernels do not work out. Compilers get the torch form, which they fuse themselves.
    """
    if triton is None or not window or torch.compiler.is_compiling() or not q.is_cuda or torch.version.hip:
        return False
    learned = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    fits = q.shape[-1] == v.shape[-1] <= LARGEST_DIM and e.shape[-1] <= LARGEST_RANK
    known = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return known and fits and not learned and torch.cuda.get_device_capability(q.device) >= (8, 0)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    r: Tensor,
    log_sum: Tensor,
    window: int,
    causal: bool = False,
    seen: Tensor | None = None,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    chunk: int | None = None,
    block: int = LEAST,
) -> tuple[Tensor, Tensor]:
    """As `banded` with w >= 1; the tensors may differ in dtype.

    Args:
        q: (B, H, N, d), scaled.
        k: (B, G, M, d).
        v: (B, G, M, d).
        e: (B, H, N, s).
        r: (B, H, M, s).
        log_sum: (B, H, N, 1).
        window: w, >= 1.
        causal: a query sees no later key.
        seen: (B, M) bool.
        bias: (H, 2P - 1), P >= M; gets no gradient.
        past: (B, H, s, d + 1).
        chunk: rows of a program, a power of two >= 16; None is what registers hold.
        block: keys that it meets at once, a power of two >= 16, at most `chunk`.

    Returns:
        (B, H, N, d) and (B, H, N, 1), in float32; a row of both is divided by the exponential of its largest logit in
        the band, or of its log-sum if that is larger, which counts as a constant in the backward pass.
    """
    tokens, keys = q.shape[-2], k.shape[-2]
    chunk = min(chunk or (64 if q.shape[-1] <= 64 else 32), max(triton.next_power_of_2(tokens), LEAST))
    block, window = min(block, chunk), min(window, keys)
    left = triton.cdiv(window - 1, block) * block if causal else window - 1
    right = 0 if causal else triton.cdiv(2 * left, chunk) * chunk - left  # so that windows end where sums do
    first = keys - tokens - left  # key of the first chunk's window, maybe below 0
    sizes = {"tokens": tokens, "keys": keys, "first": first, "width": left + chunk + right, "CHUNK": chunk}
    far = far_sums(r, v, causal, past, **sizes)
    if seen is None:
        seen = torch.ones(1, keys, dtype=torch.bool, device=q.device)
    sizes |= {"heads": q.shape[1], "window": window, "seen_step": keys if len(seen) > 1 else 0}
    sizes |= {"centre": 0 if bias is None else bias.shape[-1] // 2, "BLOCK": block, "CAUSAL": causal}
    total, mass = Band.apply(q, k, v, e, r, log_sum, far, seen.contiguous().view(torch.uint8), bias, sizes)
    return total, mass


def far_sums(
    r: Tensor, v: Tensor, causal: bool, past: Tensor | None, tokens: int, keys: int, first: int, width: int, CHUNK: int
) -> Tensor | None:
    """The sum of r [v, 1]^T beyond the window of every chunk, (B, G, chunks, H / G s, d + 1) in float32, None if empty.

    Keys are summed in blocks that begin where windows do. The first window begins with block `before` of those that
    there are, if that is not negative, and every window ends before block `after` of the first.
    """
    groups, chunks, lead = v.shape[1], -(-tokens // CHUNK), -first % CHUNK
    before, blocks = (first + lead) // CHUNK, -(-(keys + lead) // CHUNK)
    after = before + width // CHUNK
    behind, ahead = before + chunks > 1, not causal and after < blocks
    far = None if past is None else past.float().unflatten(1, (groups, -1)).flatten(2, 3).unsqueeze(2)
    if behind or ahead:
        r = r.float().unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # (B, G, M, H / G s)
        shape, missing = (blocks, CHUNK), (0, 0, lead, blocks * CHUNK - lead - keys)
        r, v = (F.pad(x, missing).unflatten(2, shape) for x in (r, v.float()))
        sums = torch.cat((r.mT @ v, r.sum(3).unsqueeze(-1)), -1)
        parts = [] if far is None else [far]
        if behind:
            empty = 1 - before  # chunks with no block before their window; if negative, blocks of no such sum
            parts.append(F.pad(sums.cumsum(2), (0, 0, 0, 0, empty, chunks - blocks - empty)))
        if ahead:
            parts.append(F.pad(sums.flip(2).cumsum(2).flip(2), (0, 0, 0, 0, -after, chunks - blocks + after)))
        far = sum(parts[1:], parts[0])
    return None if far is None else far.expand(-1, -1, chunks, -1, -1).contiguous()


class Band(torch.autograd.Function):
    """The kernels, with what they need around them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Inputs as `fused` hands them over; far (B, G, chunks, H / G s, d + 1) or None, seen (B or 1, M) uint8."""
        tensors: list[Any] = [None if x is None else x.contiguous() for x in inputs[:-1]]
        q, k, e = tensors[0], tensors[1], tensors[3]
        sizes = inputs[-1] | {"DIM": q.shape[-1], "RANK": e.shape[-1], "RATIO": q.shape[1] // k.shape[1]}
        sizes |= {f"BLOCK_{x[0]}": max(triton.next_power_of_2(sizes[x]), LEAST) for x in ("DIM", "RANK")}
        sizes["PRECISION"] = PRECISION if q.dtype == torch.float32 else "tf32"
        total, mass = (torch.empty_like(x, dtype=torch.float32) for x in (q, q[..., :1]))
        largest = torch.empty_like(mass, dtype=torch.float32)
        launch(forward_kernel, q[..., 0].numel() // sizes["tokens"], "tokens", [*tensors, total, mass, largest], sizes)
        ctx.save_for_backward(*tensors, largest)
        ctx.sizes = sizes
        return total, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, e, r, log_sum and far, each of its input's shape and dtype."""
        *tensors, largest = ctx.saved_tensors
        tensors = [*tensors, largest, *(x.contiguous() for x in grads)]
        d_q, d_k, d_v, d_e, d_r, d_log_sum, d_far = (None if x is None else torch.empty_like(x) for x in tensors[:7])
        heads = tensors[0][..., 0].numel() // ctx.sizes["tokens"]
        launch(rows_kernel, heads, "tokens", [*tensors, d_q, d_e, d_log_sum, d_far], ctx.sizes)
        launch(keys_kernel, heads // ctx.sizes["RATIO"], "keys", [*tensors, d_k, d_v, d_r], ctx.sizes)
        return d_q, d_k, d_v, d_e, d_r, d_log_sum, d_far, None, None, None


def launch(function: Any, heads: int, axis: str, tensors: list[Tensor | None], sizes: dict[str, Any]) -> None:
    """Run a kernel, one program for every chunk of `axis` of every head."""
    lead = -sizes["first"] % sizes["CHUNK"] if axis == "keys" else 0
    programs = heads * triton.cdiv(sizes[axis] + lead, sizes["CHUNK"])
    assert tensors[0] is not None
    with torch.cuda.device_of(tensors[0]):
        function[(programs,)](*tensors, **sizes, num_warps=8, num_stages=2)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled by Triton where that is installed; for no length anew."""
    lengths = {"heads", "tokens", "keys", "first", "width", "window", "seen_step", "centre"}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[x for x in names if x in lengths]) if triton else function


@kernel
def tile(base: tensor, rows: tensor, limit: tensor, step: tensor, size: tensor, WIDTH: constexpr) -> tensor:
    """Rows of `size` values each, `step` apart, as (rows, WIDTH) float32; zero outside."""
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] >= 0) & (rows[:, None] < limit) & (columns[None, :] < size)
    return tl.load(base + rows[:, None] * step + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@kernel
def put(
    base: tensor, rows: tensor, limit: tensor, step: tensor, values: tensor, size: tensor, WIDTH: constexpr
) -> None:
    """The reverse of `tile`."""
    columns = tl.arange(0, WIDTH)
    inside = (rows[:, None] >= 0) & (rows[:, None] < limit) & (columns[None, :] < size)
    tl.store(base + rows[:, None] * step + columns[None, :], values.to(base.dtype.element_ty), mask=inside)


@kernel
def column(base: tensor, rows: tensor, limit: tensor, step: tensor) -> tensor:
    """One value of each row, (rows,) float32; zero outside."""
    return tl.load(base + rows * step, mask=(rows >= 0) & (rows < limit), other=0.0).to(tl.float32)


@kernel
def sight(offset: tensor, window: tensor, CAUSAL: constexpr) -> tuple[tensor, tensor]:
    """Where `offset`, query minus key position, is in the band, and where a key is seen from outside of it."""
    distance = offset if CAUSAL else tl.abs(offset)
    return (distance >= 0) & (distance < window), distance >= window


@kernel
def logits(
    a: tensor,
    b: tensor,
    inside: tensor,
    offset: tensor,
    bias: tensor,
    head: tensor,
    centre: tensor,
    PRECISION: constexpr,
) -> tensor:
    """Products of rows of a and b, with the bias; minus infinity where not `inside`."""
    found = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if bias is not None:
        places = head * (2 * centre + 1) + centre - offset
        found += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, found, float("-inf"))


@kernel
def forward_kernel(
    q: tensor, k: tensor, v: tensor, e: tensor, r: tensor, log_sum: tensor, far: tensor, seen: tensor, bias: tensor,
    total: tensor, mass: tensor, largest: tensor,
    tokens: tensor, keys: tensor, first: tensor, width: tensor, heads: tensor, window: tensor, seen_step: tensor,
    centre: tensor, CHUNK: constexpr, BLOCK: constexpr, CAUSAL: constexpr, DIM: constexpr, RANK: constexpr,
    RATIO: constexpr, BLOCK_D: constexpr, BLOCK_R: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """Total, mass and largest of a chunk of rows; the largest logit is known so far only, as in flash attention."""
    chunks = tl.cdiv(tokens, CHUNK)
    head, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    group, row = head // RATIO, head * tokens
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    q_rows = tile(q + row * DIM, rows, tokens, DIM, DIM, BLOCK_D)
    e_rows = tile(e + row * RANK, rows, tokens, RANK, RANK, BLOCK_R)
    given = column(log_sum + row, rows, tokens, 1)
    most, weight, sums = given, tl.zeros_like(given), tl.zeros_like(q_rows)
    start = first + chunk * CHUNK
    begin = start + tl.maximum(-start, 0) // BLOCK * BLOCK
    for place in range(begin, tl.minimum(start + width, keys), BLOCK):
        places = place + tl.arange(0, BLOCK)
        k_rows = tile(k + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
        v_rows = tile(v + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
        r_rows = tile(r + head * keys * RANK, places, keys, RANK, RANK, BLOCK_R)
        offset = (keys - tokens + rows)[:, None] - places[None, :]
        inside, outside = sight(offset, window, CAUSAL)
        known = column(seen + head // heads * seen_step, places, keys, 1) > 0
        inside = inside & known[None, :] & (rows < tokens)[:, None]
        exact = logits(q_rows, k_rows, inside, offset, bias, head % heads, centre, PRECISION)
        more = tl.maximum(most, tl.max(exact, 1))
        beyond = tl.dot(e_rows, tl.trans(r_rows), input_precision=PRECISION) * tl.exp(given - more)[:, None]
        weights = tl.exp(exact - more[:, None]) + tl.where(outside, beyond, 0.0)
        shrink = tl.exp(most - more)
        weight = weight * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights, v_rows, sums * shrink[:, None], input_precision=PRECISION)
        most = more
    if far is not None:
        table = far + ((group * chunks + chunk) * RATIO + head % RATIO) * (RANK * (DIM + 1))
        ranks = tl.arange(0, BLOCK_R)
        e_rows *= tl.exp(given - most)[:, None]
        sums = tl.dot(e_rows, tile(table, ranks, RANK, DIM + 1, DIM, BLOCK_D), sums, input_precision=PRECISION)
        weight += tl.sum(e_rows * column(table + DIM, ranks, RANK, DIM + 1)[None, :], 1)
    put(total + row * DIM, rows, tokens, DIM, sums, DIM, BLOCK_D)
    tl.store(mass + row + rows, weight.to(mass.dtype.element_ty), mask=rows < tokens)
    tl.store(largest + row + rows, most, mask=rows < tokens)


@kernel
def rows_kernel(
    q: tensor, k: tensor, v: tensor, e: tensor, r: tensor, log_sum: tensor, far: tensor, seen: tensor, bias: tensor,
    largest: tensor, d_total: tensor, d_mass: tensor, d_q: tensor, d_e: tensor, d_log_sum: tensor, d_far: tensor,
    tokens: tensor, keys: tensor, first: tensor, width: tensor, heads: tensor, window: tensor, seen_step: tensor,
    centre: tensor, CHUNK: constexpr, BLOCK: constexpr, CAUSAL: constexpr, DIM: constexpr, RANK: constexpr,
    RATIO: constexpr, BLOCK_D: constexpr, BLOCK_R: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """Gradients of what belongs to a chunk of rows: q, e, log_sum and the sums beyond its window."""
    chunks = tl.cdiv(tokens, CHUNK)
    head, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    group, row = head // RATIO, head * tokens
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    q_rows = tile(q + row * DIM, rows, tokens, DIM, DIM, BLOCK_D)
    g_rows = tile(d_total + row * DIM, rows, tokens, DIM, DIM, BLOCK_D)
    g_mass, most = column(d_mass + row, rows, tokens, 1), column(largest + row, rows, tokens, 1)
    of_q, of_e = tl.zeros_like(q_rows), tl.zeros([CHUNK, BLOCK_R], tl.float32)
    start = first + chunk * CHUNK
    begin = start + tl.maximum(-start, 0) // BLOCK * BLOCK
    for place in range(begin, tl.minimum(start + width, keys), BLOCK):
        places = place + tl.arange(0, BLOCK)
        k_rows = tile(k + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
        v_rows = tile(v + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
        r_rows = tile(r + head * keys * RANK, places, keys, RANK, RANK, BLOCK_R)
        offset = (keys - tokens + rows)[:, None] - places[None, :]
        inside, outside = sight(offset, window, CAUSAL)
        known = column(seen + head // heads * seen_step, places, keys, 1) > 0
        inside = inside & known[None, :] & (rows < tokens)[:, None]
        exact = logits(q_rows, k_rows, inside, offset, bias, head % heads, centre, PRECISION)
        of_weights = tl.dot(g_rows, tl.trans(v_rows), input_precision=PRECISION) + g_mass[:, None]
        of_q = tl.dot(tl.exp(exact - most[:, None]) * of_weights, k_rows, of_q, input_precision=PRECISION)
        of_e = tl.dot(tl.where(outside, of_weights, 0.0), r_rows, of_e, input_precision=PRECISION)
    given = column(log_sum + row, rows, tokens, 1)
    scale = tl.exp(given - most)[:, None]
    if far is not None:
        table = ((group * chunks + chunk) * RATIO + head % RATIO) * (RANK * (DIM + 1))
        for rank in range(0, RANK, 16):  # a few at a time, for want of registers
            ranks = rank + tl.arange(0, 16)
            far_rows = tile(far + table, ranks, RANK, DIM + 1, DIM, BLOCK_D)
            of_part = tl.dot(g_rows, tl.trans(far_rows), input_precision=PRECISION)
            of_part += g_mass[:, None] * column(far + table + DIM, ranks, RANK, DIM + 1)[None, :]
            unit = (ranks[:, None] == tl.arange(0, BLOCK_R)[None, :]).to(tl.float32)
            of_e = tl.dot(of_part, unit, of_e, input_precision=PRECISION)
            part = tile(e + row * RANK + rank, rows, tokens, RANK, RANK - rank, 16) * scale
            of_far = tl.dot(tl.trans(part), g_rows, input_precision=PRECISION)
            of_mass = tl.sum(part * g_mass[:, None], 0)
            put(d_far + table, ranks, RANK, DIM + 1, of_far, DIM, BLOCK_D)
            tl.store(d_far + table + DIM + ranks * (DIM + 1), of_mass, mask=ranks < RANK)
    of_e *= scale
    e_rows = tile(e + row * RANK, rows, tokens, RANK, RANK, BLOCK_R)
    put(d_q + row * DIM, rows, tokens, DIM, of_q, DIM, BLOCK_D)
    put(d_e + row * RANK, rows, tokens, RANK, of_e, RANK, BLOCK_R)
    of_log_sum = tl.sum(of_e * e_rows, 1)  # e and exp(log_sum) enter as their product alone
    tl.store(d_log_sum + row + rows, of_log_sum.to(d_log_sum.dtype.element_ty), mask=rows < tokens)


@kernel
def keys_kernel(
    q: tensor, k: tensor, v: tensor, e: tensor, r: tensor, log_sum: tensor, far: tensor, seen: tensor, bias: tensor,
    largest: tensor, d_total: tensor, d_mass: tensor, d_k: tensor, d_v: tensor, d_r: tensor,
    tokens: tensor, keys: tensor, first: tensor, width: tensor, heads: tensor, window: tensor, seen_step: tensor,
    centre: tensor, CHUNK: constexpr, BLOCK: constexpr, CAUSAL: constexpr, DIM: constexpr, RANK: constexpr,
    RATIO: constexpr, BLOCK_D: constexpr, BLOCK_R: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """Gradients of what belongs to a block of keys, over the chunks whose windows have it: k, v and r.

    Blocks are those of `far_sums`. Weights stand transposed: keys by rows.
    """
    lead = (CHUNK - first % CHUNK) % CHUNK
    blocks = tl.cdiv(keys + lead, CHUNK)
    group, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    places = block * CHUNK - lead + tl.arange(0, CHUNK)
    k_rows = tile(k + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
    v_rows = tile(v + group * keys * DIM, places, keys, DIM, DIM, BLOCK_D)
    known = column(seen + group * RATIO // heads * seen_step, places, keys, 1) > 0
    of_k, of_v = tl.zeros_like(k_rows), tl.zeros_like(v_rows)
    last = block - (first + lead) // CHUNK  # chunk whose window begins with this block
    begin = tl.maximum(last - tl.cdiv(width, CHUNK) + 1, 0) * CHUNK
    end = tl.minimum((last + 1) * CHUNK, tokens)
    for head in range(group * RATIO, (group + 1) * RATIO):
        r_rows = tile(r + head * keys * RANK, places, keys, RANK, RANK, BLOCK_R)
        of_r, row = tl.zeros_like(r_rows), head * tokens
        for place in range(begin, end, BLOCK):
            rows = place + tl.arange(0, BLOCK)
            q_rows = tile(q + row * DIM, rows, tokens, DIM, DIM, BLOCK_D)
            e_rows = tile(e + row * RANK, rows, tokens, RANK, RANK, BLOCK_R)
            g_rows = tile(d_total + row * DIM, rows, tokens, DIM, DIM, BLOCK_D)
            g_mass, most = column(d_mass + row, rows, tokens, 1), column(largest + row, rows, tokens, 1)
            e_rows *= tl.exp(column(log_sum + row, rows, tokens, 1) - most)[:, None]
            offset = (keys - tokens + rows)[None, :] - places[:, None]
            inside, outside = sight(offset, window, CAUSAL)
            inside = inside & known[:, None] & (rows < tokens)[None, :]
            exact = logits(k_rows, q_rows, inside, offset, bias, head % heads, centre, PRECISION)
            exact = tl.exp(exact - most[None, :])
            beyond = tl.dot(r_rows, tl.trans(e_rows), input_precision=PRECISION)
            weights = exact + tl.where(outside, beyond, 0.0)
            of_v = tl.dot(weights, g_rows, of_v, input_precision=PRECISION)
            of_weights = tl.dot(v_rows, tl.trans(g_rows), input_precision=PRECISION) + g_mass[None, :]
            of_k = tl.dot(exact * of_weights, q_rows, of_k, input_precision=PRECISION)
            of_r = tl.dot(tl.where(outside, of_weights, 0.0), e_rows, of_r, input_precision=PRECISION)
        put(d_r + head * keys * RANK, places, keys, RANK, of_r, RANK, BLOCK_R)
    put(d_k + group * keys * DIM, places, keys, DIM, of_k, DIM, BLOCK_D)
    put(d_v + group * keys * DIM, places, keys, DIM, of_v, DIM, BLOCK_D)
