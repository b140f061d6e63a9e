"""References of the recurrent ops, and their CPU versions.

What a sequence remembers lies in a slot of a pool. Each op reads the slots of the step's entries
and leaves there what the next step begins with; an entry without a state yet begins with zeros,
whatever its slot holds. Decode entries come first, one token each. Then come `num_drafted` entries
of a last token and its drafts: they leave their slots as they were, and what of them counts goes
through the slots afterwards (`keep_conv`, `keep_delta`).

Legend: T tokens in the step, N entries, B of them with drafts, S slots, C channels of the
convolution, X columns of its input, W taps, P = W - 1 past inputs; H key heads, V value heads,
R = V / H (value head v belongs to key head v // R), K key size, D value size, E = R * D; M chunks
of an entry, L tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.op import cpu, op

UNIT_EPS = 1e-6  # under the root of a key's or query's squared length
_CHUNK = 64

_CONV = "penstock.kernels.recurrent.triton_conv"
_DELTA = "penstock.kernels.recurrent.triton_delta"
_GATES = "penstock.kernels.recurrent.triton_gates"


@op(gpu_module=_CONV)
def causal_conv(
    x_TX: Tensor,
    columns_C: Tensor,
    run: int,
    weight_CW: Tensor,
    state_SPC: Tensor,
    slots_N: Tensor,
    has_state_N: Tensor,
    query_starts_N1: Tensor,
    num_decodes: int,
    num_drafted: int = 0,
) -> Tensor:
    """silu of each channel's weighted sum over its last W inputs; in fp32, [T, C] in x's dtype.

    The input of channel c is column `columns_C[c]` of x. Columns come in runs of `run`, one beside
    the other from a multiple of `run` on. A slot keeps the last P inputs, oldest first.
    """
    x_TC = x_TX[:, columns_C.long()]
    num_tokens, num_past = x_TC.shape[0], state_SPC.shape[1]
    starts_N, ends_N = query_starts_N1[:-1].long(), query_starts_N1[1:].long()
    past_NPC = torch.where(has_state_N[:, None, None], state_SPC[slots_N.long()], 0)

    def inputs(entry: Tensor, position: Tensor) -> Tensor:
        """Rows of x by their place in the entry; the past is at -P to -1."""
        from_step = x_TC[(starts_N[entry] + position).clamp(0, num_tokens - 1)]
        from_past = past_NPC[entry, (position + num_past).clamp(0, num_past - 1)]
        return torch.where((position >= 0)[..., None], from_step, from_past)

    token_T = torch.arange(num_tokens, device=x_TX.device)
    # Tokens behind the last entry fill up a CUDA graph: whatever becomes of them is nobody's.
    entry_T = torch.searchsorted(ends_N, token_T, right=True).clamp(max=len(slots_N) - 1)
    y_TC = x_TC.new_zeros(x_TC.shape, dtype=torch.float32)
    for tap in range(num_past + 1):
        position_T = token_T - starts_N[entry_T] + tap - num_past
        y_TC += inputs(entry_T, position_T).float() * weight_CW[:, tap].float()

    entry_N1 = torch.arange(len(slots_N), device=x_TX.device)[:, None]
    position_NP = (ends_N - starts_N - num_past)[:, None] + token_T.new_tensor(range(num_past))
    is_kept_N = (ends_N > starts_N) & ~_drafted(slots_N, num_decodes, num_drafted)
    state_SPC[slots_N.long()[is_kept_N]] = inputs(entry_N1, position_NP)[is_kept_N]
    return F.silu(y_TC).to(x_TX.dtype)


@op(gpu_module=_CONV)
def keep_conv(
    x_TX: Tensor,
    columns_C: Tensor,
    run: int,
    state_SPC: Tensor,
    slots_N: Tensor,
    query_starts_N1: Tensor,
    counts_N: Tensor,
    num_decodes: int,
    num_drafted: int,
) -> None:
    """The first `counts_N` tokens of entries with drafts, one at least, go through their slots for
    good: a slot has the last P inputs of them and of what it had."""
    slots_B, starts_B, ends_B = _kept(slots_N, query_starts_N1, counts_N, num_decodes, num_drafted)
    x_TC, past_BPC, num_past = x_TX[:, columns_C.long()], state_SPC[slots_B], state_SPC.shape[1]
    position_BP = (ends_B - starts_B)[:, None] + torch.arange(-num_past, 0, device=x_TX.device)
    at_BP = (starts_B[:, None] + position_BP).clamp(0, len(x_TX) - 1)
    old_BP1 = (position_BP + num_past).clamp(max=num_past - 1)[..., None]
    state_SPC[slots_B] = torch.where(
        (position_BP >= 0)[..., None], x_TC[at_BP], past_BPC.take_along_dim(old_BP1, 1)
    )


@op(gpu_module=_GATES)
def delta_gates(ba_THG: Tensor, rate_log_V: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta), both fp32 [T, V]: the logarithm of a token's decay and the strength of its write.

    Of the 2R columns of a key head the first R are for beta = sigmoid(b), the others for
    g = -exp(rate_log) * softplus(a + bias).
    """
    b_THR, a_THR = ba_THG.float().chunk(2, dim=-1)
    g_TV = -rate_log_V.float().exp() * F.softplus(a_THR.flatten(1) + bias_V.float())
    return g_TV, b_THR.flatten(1).sigmoid()


@op(gpu_module=_DELTA)
def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TVD: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state_SVKD: Tensor,
    slots_N: Tensor,
    has_state_N: Tensor,
    query_starts_N1: Tensor,
    num_decodes: int,
    num_drafted: int = 0,
) -> Tensor:
    """The gated delta rule, token by token in fp32; [T, V, D] in v's dtype.

    The state maps keys to values. With q and k scaled to unit length, and q by K^-1/2, a token does
        state = exp(g) * state
        state = state + k (x) beta * (v - k . state)
        out = q . state
    """
    (num_tokens, num_heads, key_size), num_value_heads = q_THK.shape, v_TVD.shape[1]
    group = num_value_heads // num_heads
    q_TVK = (_unit(q_THK) * key_size**-0.5).repeat_interleave(group, dim=1)
    k_TVK = _unit(k_THK).repeat_interleave(group, dim=1)
    starts_N, ends_N = query_starts_N1[:-1].long(), query_starts_N1[1:].long()
    now_NVKD = torch.where(has_state_N[:, None, None, None], state_SVKD[slots_N.long()], 0.0)
    out_TVD = v_TVD.new_empty((num_tokens + 1, *v_TVD.shape[1:]))  # the last: of ended entries
    for step in range(max(1, num_tokens - num_decodes)):  # no entry is longer
        is_on_N = starts_N + step < ends_N
        at_N = (starts_N + step).clamp(max=num_tokens - 1)
        q_NVK, k_NVK, v_NVD = q_TVK[at_N], k_TVK[at_N], v_TVD[at_N].float()
        next_NVKD = now_NVKD * g_TV[at_N].exp()[..., None, None]
        known_NVD = torch.einsum("nvk,nvkd->nvd", k_NVK, next_NVKD)
        write_NVD = beta_TV[at_N][..., None] * (v_NVD - known_NVD)
        next_NVKD = next_NVKD + k_NVK[..., None] * write_NVD[:, :, None]
        out_NVD = torch.einsum("nvk,nvkd->nvd", q_NVK, next_NVKD)
        out_TVD[torch.where(is_on_N, at_N, num_tokens)] = out_NVD.to(v_TVD.dtype)
        now_NVKD = torch.where(is_on_N[:, None, None, None], next_NVKD, now_NVKD)
    is_kept_N = (ends_N > starts_N) & ~_drafted(slots_N, num_decodes, num_drafted)
    state_SVKD[slots_N.long()[is_kept_N]] = now_NVKD[is_kept_N]
    return out_TVD[:-1]


@op(gpu_module=_DELTA)
def keep_delta(
    k_THK: Tensor,
    v_TVD: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state_SVKD: Tensor,
    slots_N: Tensor,
    query_starts_N1: Tensor,
    counts_N: Tensor,
    num_decodes: int,
    num_drafted: int,
) -> None:
    """The first `counts_N` tokens of entries with drafts, one at least, go through their slots for
    good, as by `gated_delta`, without outputs."""
    slots_B, starts_B, ends_B = _kept(slots_N, query_starts_N1, counts_N, num_decodes, num_drafted)
    k_TVK = _unit(k_THK).repeat_interleave(v_TVD.shape[1] // k_THK.shape[1], dim=1)
    now_BVKD = state_SVKD[slots_B]
    for step in range(int((ends_B - starts_B).max()) if len(slots_B) else 0):
        at_B = (starts_B + step).clamp(max=len(k_THK) - 1)
        k_BVK, v_BVD = k_TVK[at_B], v_TVD[at_B].float()
        next_BVKD = now_BVKD * g_TV[at_B].exp()[..., None, None]
        known_BVD = torch.einsum("bvk,bvkd->bvd", k_BVK, next_BVKD)
        write_BVD = beta_TV[at_B][..., None] * (v_BVD - known_BVD)
        next_BVKD = next_BVKD + k_BVK[..., None] * write_BVD[:, :, None]
        is_on_B = starts_B + step < ends_B
        now_BVKD = torch.where(is_on_B[:, None, None, None], next_BVKD, now_BVKD)
    state_SVKD[slots_B] = now_BVKD


@op(gpu_module=_GATES)
def rms_norm_gated(x_TVD: Tensor, z_THE: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each value head's RMS norm times silu(z), in fp32; back in x's dtype."""
    x32 = x_TVD.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return (x32 * F.silu(z_THE.reshape(x_TVD.shape).float())).to(x_TVD.dtype)


def _drafted(slots_N: Tensor, num_decodes: int, num_drafted: int) -> Tensor:
    entry_N = torch.arange(len(slots_N), device=slots_N.device)
    return (entry_N >= num_decodes) & (entry_N < num_decodes + num_drafted)


def _kept(
    slots_N: Tensor,
    query_starts_N1: Tensor,
    counts_N: Tensor,
    num_decodes: int,
    num_drafted: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(slot, first token, end of those that count) of each entry with drafts; those without tokens
    are left out."""
    here = slice(num_decodes, num_decodes + num_drafted)
    starts_B, ends_B = query_starts_N1[:-1][here].long(), query_starts_N1[1:][here].long()
    has_tokens_B = ends_B > starts_B
    ends_B = torch.minimum(ends_B, starts_B + counts_N[here].long())
    return slots_N[here].long()[has_tokens_B], starts_B[has_tokens_B], ends_B[has_tokens_B]


def _unit(x_THK: Tensor) -> Tensor:
    x32 = x_THK.float()
    return x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + UNIT_EPS)


@causal_conv.impl("torch", needs=cpu())
def causal_conv_torch(
    x_TX,
    columns_C,
    run,
    weight_CW,
    state_SPC,
    slots_N,
    has_state_N,
    query_starts_N1,
    num_decodes,
    num_drafted=0,
):
    """All decodes at once, other entries one by one, with a multiply-add per tap."""
    x_TC = x_TX.index_select(1, columns_C)
    num_past = state_SPC.shape[1]
    weight_WC = weight_CW.T.float()
    y_TC = torch.empty_like(x_TC, dtype=torch.float32)
    if num_decodes:
        slots = slots_N[:num_decodes].long()
        past_NPC = torch.where(has_state_N[:num_decodes, None, None], state_SPC[slots], 0)
        inputs_NWC = torch.cat((past_NPC, x_TC[:num_decodes, None]), dim=1)
        y_TC[:num_decodes] = (inputs_NWC.float() * weight_WC).sum(1)
        state_SPC[slots] = inputs_NWC[:, 1:]
    for start, end, slot, has_state, is_kept in _long_entries(
        slots_N, has_state_N, query_starts_N1, num_decodes, num_drafted
    ):
        past_PC = state_SPC[slot] if has_state else torch.zeros_like(state_SPC[slot])
        inputs_QC = torch.cat((past_PC, x_TC[start:end]))
        if is_kept:
            state_SPC[slot] = inputs_QC[end - start :]
        inputs_QC, y_QC = inputs_QC.float(), y_TC[start:end].zero_()
        for tap in range(num_past + 1):
            y_QC.addcmul_(inputs_QC[tap : tap + end - start], weight_WC[tap])
    return F.silu(y_TC, inplace=True).to(x_TX.dtype)


@gated_delta.impl("torch", needs=cpu())
def gated_delta_torch(
    q_THK,
    k_THK,
    v_TVD,
    g_TV,
    beta_TV,
    state_SVKD,
    slots_N,
    has_state_N,
    query_starts_N1,
    num_decodes,
    num_drafted=0,
):
    """All decodes in one step, other entries one by one in chunks."""
    q_THK, k_THK = _unit(q_THK) * q_THK.shape[-1] ** -0.5, _unit(k_THK)
    out_TVD = torch.empty_like(v_TVD, memory_format=torch.contiguous_format)
    if num_decodes:
        here = slice(num_decodes)
        slots, is_first_N = slots_N[here].long(), ~has_state_N[here]
        # A slice of the pool where there is one decode, else a copy.
        now_NVKD = state_SVKD[slots[0] :][:1] if num_decodes == 1 else state_SVKD[slots]
        if is_first_N.any():
            now_NVKD[is_first_N] = 0.0
        parts = (q_THK[here], k_THK[here], v_TVD[here].float(), g_TV[here], beta_TV[here])
        out_TVD[here] = _step(*parts, now_NVKD)
        if num_decodes > 1:
            state_SVKD[slots] = now_NVKD
    for start, end, slot, has_state, is_kept in _long_entries(
        slots_N, has_state_N, query_starts_N1, num_decodes, num_drafted
    ):
        here = slice(start, end)
        now_VKD = state_SVKD[slot] if has_state else torch.zeros_like(state_SVKD[slot])
        parts = (q_THK[here], k_THK[here], v_TVD[here].float(), g_TV[here], beta_TV[here])
        out_TVD[here], now_VKD = _chunks(*parts, now_VKD)
        if is_kept:
            state_SVKD[slot] = now_VKD
    return out_TVD


@keep_delta.impl("torch", needs=cpu())
def keep_delta_torch(
    k_THK,
    v_TVD,
    g_TV,
    beta_TV,
    state_SVKD,
    slots_N,
    query_starts_N1,
    counts_N,
    num_decodes,
    num_drafted,
):
    """Entries one by one in chunks."""
    k_THK = _unit(k_THK)
    kept = _kept(slots_N, query_starts_N1, counts_N, num_decodes, num_drafted)
    for slot, start, end in zip(*(x.tolist() for x in kept), strict=True):
        here = slice(start, end)
        parts = (k_THK[here], v_TVD[here].float(), g_TV[here], beta_TV[here])
        _, state_SVKD[slot] = _chunks(k_THK[here], *parts, state_SVKD[slot])


def _long_entries(
    slots_N: Tensor,
    has_state_N: Tensor,
    query_starts_N1: Tensor,
    num_decodes: int,
    num_drafted: int,
) -> list[tuple[int, int, int, bool, bool]]:
    """(first token, end, slot, whether it has a state, whether it leaves one) of each entry with
    tokens but decodes."""
    starts = query_starts_N1[num_decodes:].tolist()
    slots, has_state = slots_N[num_decodes:].tolist(), has_state_N[num_decodes:].tolist()
    is_kept = (place >= num_drafted for place in range(len(slots)))
    entries = zip(starts[:-1], starts[1:], slots, has_state, is_kept, strict=True)
    return [entry for entry in entries if entry[0] < entry[1]]


def _step(
    q_NHK: Tensor, k_NHK: Tensor, v_NVD: Tensor, g_NV: Tensor, beta_NV: Tensor, now_NVKD: Tensor
) -> Tensor:
    """One token of each of N sequences; `now_NVKD` becomes the state behind it.

    The output is read from the state before, and the write's part added: one pass less.
    """
    num_entries, num_value_heads, key_size, value_size = now_NVKD.shape
    state = now_NVKD.view(-1, key_size, value_size)
    group = num_value_heads // q_NHK.shape[1]
    kq_NH2K = torch.stack((k_NHK, q_NHK), dim=2)
    kq = kq_NH2K.repeat_interleave(group, dim=1).view(-1, 2, key_size)
    decay = g_NV.exp().view(-1, 1, 1)
    known, read = (kq @ state * decay).split(1, dim=1)
    write = (v_NVD.reshape(-1, 1, value_size) - known) * beta_NV.reshape(-1, 1, 1)
    k, q = kq.split(1, dim=1)
    state.mul_(decay).baddbmm_(k.mT, write)
    out = read + (q * k).sum(-1, keepdim=True) * write
    return out.view(num_entries, num_value_heads, value_size)


def _chunks(
    q_QHK: Tensor, k_QHK: Tensor, v_QVD: Tensor, g_QV: Tensor, beta_QV: Tensor, state_VKD: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs, state behind them) of one sequence's Q tokens, L at a time.

    Inside a chunk, with c the running sum of g and writes U, one row per token:
        (I + A) U = beta * (v - exp(c) * k . state)   A[i, j] = beta[i] exp(c[i] - c[j]) k[i] . k[j]
        out = exp(c) * q . state + B U                B[i, j] = exp(c[i] - c[j]) q[i] . k[j]
    where A has the pairs j < i and B those with j <= i.
    """
    num_tokens, num_value_heads = v_QVD.shape[:2]
    size = min(_CHUNK, num_tokens)
    group = num_value_heads // q_QHK.shape[1]

    def chunked(x: Tensor) -> Tensor:
        """[tokens, heads, ...] -> [heads, M, L, ...]; tokens of zeros fill the last chunk."""
        padding = [0, 0] * (x.dim() - 1) + [0, -num_tokens % size]
        return F.pad(x, padding).unflatten(0, (-1, size)).movedim(2, 0)

    def by_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=0)

    q_HMLK, k_HMLK, v_VMLD = chunked(q_QHK), chunked(k_QHK), chunked(v_QVD)
    beta_VML, c_VML = chunked(beta_QV), chunked(g_QV).cumsum(-1)
    is_later_LL = torch.ones(size, size, dtype=torch.bool).triu(1)
    decay_VMLL = (c_VML[..., :, None] - c_VML[..., None, :]).masked_fill(is_later_LL, -torch.inf)
    decay_VMLL = decay_VMLL.exp()
    a_VMLL = by_value_head(k_HMLK @ k_HMLK.mT) * decay_VMLL * beta_VML[..., None]
    b_VMLL = by_value_head(q_HMLK @ k_HMLK.mT) * decay_VMLL
    # The diagonal of `a` is not read: it counts as one.
    solve_VMLL = torch.linalg.solve_triangular(
        a_VMLL, torch.eye(size).expand_as(a_VMLL), upper=False, unitriangular=True
    )
    solve_VMLL = solve_VMLL * beta_VML[..., None, :]

    q_VMLK, k_VMLK = by_value_head(q_HMLK), by_value_head(k_HMLK)
    q_VMLK = q_VMLK * c_VML.exp()[..., None]
    k_in_VMLK = k_VMLK * c_VML.exp()[..., None]
    k_out_VMLK = k_VMLK * (c_VML[..., -1:] - c_VML).exp()[..., None]
    decay_VM11 = c_VML[..., -1].exp()[..., None, None]
    outs = []
    for m in range(v_VMLD.shape[1]):
        write_VLD = solve_VMLL[:, m] @ (v_VMLD[:, m] - k_in_VMLK[:, m] @ state_VKD)
        outs.append(q_VMLK[:, m] @ state_VKD + b_VMLL[:, m] @ write_VLD)
        state_VKD = state_VKD * decay_VM11[:, m] + k_out_VMLK[:, m].mT @ write_VLD
    return torch.cat(outs, dim=1)[:, :num_tokens].transpose(0, 1), state_VKD
