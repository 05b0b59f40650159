"""Fast twins of k3.py's plain paths, in PyTorch operations alone: no Triton, no torch.compile, no C++."""
import torch
import torch.nn.functional as F

TILE = 16     # tokens whose decays are divided: exp(16 * 5) = e^80 is still below fp32's and bf16's e^88
CHUNK = 128   # tokens of one affine map; longer means fewer steps of the scan, shorter less inner work


def kda_chunk(q, k, v, g, beta, S=None, scale=None):
    B, T, H, dk = q.shape
    acc = torch.promote_types(v.dtype, torch.float32)
    S = q.new_zeros(B, H, dk, v.shape[-1], dtype=acc) if S is None else S.to(acc)
    if T == 0:
        return v.clone(), S.clone()
    return _KDAChunk.apply(q, k, v, g, beta, S, dk**-0.5 if scale is None else scale)


def reorder(new, x):
    """new.copy_(x), eight bytes at a time where possible: such copies cost by the element, not by the byte."""
    if new.dtype == x.dtype and all(y.stride(-1) == 1 and y.shape[-1] * y.element_size() % 8 == 0
                                    and y.storage_offset() * y.element_size() % 8 == 0 for y in (new, x)):
        new, x = new.view(torch.int64), x.view(torch.int64)
    new.copy_(x)


def mm(a, b, out=None, **alpha):
    """Batched a @ b summed in fp32; the result has out's dtype, or else that of the operands."""
    if not alpha and (out is None or out.dtype == a.dtype):
        return torch.bmm(a, b, out=out)
    if not alpha:
        return torch.bmm(a, b, out_dtype=out.dtype, out=out)
    return torch.baddbmm(out, a, b, out=out, **alpha)


def halves(x, w):
    """The even and the odd runs of w tokens of x [chunks, C, d], each [runs, w, d] (views)."""
    return x.view(-1, 2, w, x.shape[-1]).unbind(1)


def on_diagonal(x):
    """Pairs of blocks x [2n, w, w] on the diagonal of new [n, 2w, 2w]; zeros above them and below."""
    n, w, _ = x.shape
    out = x.new_zeros(n // 2, 2 * w, 2 * w)
    reorder(out.view(-1, 2, w, 2, w).diagonal(0, 1, 3).movedim(-1, 1), x.view(-1, 2, w, w))
    return out


class _Layout:
    """[B, T, H, d] and back from [chunks * B * H, C, d]: chunks first, so that one step of the scan is a slice."""

    def __init__(self, v):
        B, T, H, _ = v.shape
        self.C = min(CHUNK, max(TILE, 1 << (T - 1).bit_length()))
        self.T, self.shape = T, (-(-T // self.C), B, H)
        self.acc = torch.promote_types(v.dtype, torch.float32)
        self.lo = v.dtype if v.is_cuda else self.acc       # matmul operands: half precision gains nothing on a CPU
        self.hi = torch.float16 if self.lo == torch.bfloat16 else self.lo       # for what is bounded by 1

    def pad(self, x):
        return F.pad(x, (0, 0, 0, 0, 0, -self.T % self.C)).contiguous()      # no decay, no write

    def turn(self, x, tokens=None):
        x = x.unflatten(1, (self.shape[0], -1)).permute(1, 0, 3, 2, 4)
        new = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        reorder(new, x)
        return new.flatten(0, 2)

    def back(self, x, dtype):
        N, B, H = self.shape
        x = x.view(N, B, H, *x.shape[1:]).permute(1, 0, 3, 2, 4)
        new = torch.empty(x.shape, dtype=dtype, device=x.device)
        reorder(new, x)
        return new.flatten(1, 2)[:, :self.T]


def decays(x, g):
    """exp of the tile's cumulative log-decay for each token, and each tile's total log-decay."""
    G = x.pad(g.to(x.acc)).unflatten(1, (-1, TILE)).cumsum(2)
    total = x.turn(G[:, :, -1].contiguous())
    E = torch.exp(G, out=torch.empty(G.shape, dtype=x.lo, device=G.device))
    return x.turn(E.flatten(1, 2)), total


def build(x, q, k, E, beta, total, keep=None):
    """From tiles to chunks by doubling: rows k and q decayed since the block's start, columns k until its end,
    T = (1/beta + tril(k k', -1))^-1 and A = tril(q k'), both with the decay between the two tokens."""
    n, C, d = k.shape
    rows, cols = torch.empty(2, n, C, d, dtype=k.dtype, device=k.device), k / E
    torch.mul(k, E, out=rows[0])
    torch.mul(q, E, out=rows[1])
    tile = lambda y: y.view(-1, TILE, y.shape[-1])
    L, A = (torch.empty(n * C // TILE, TILE, TILE, dtype=x.acc, device=k.device) for _ in range(2))
    L = mm(tile(rows[0]), tile(cols).mT, out=L) * tile(beta)
    A = mm(tile(rows[1]), tile(cols).mT, out=A).tril_().to(x.hi)
    T = torch.linalg.solve_triangular(L, torch.diag_embed(tile(beta).squeeze(-1)), upper=False, unitriangular=True)
    T = torch.empty_like(L, dtype=x.hi).copy_(T)
    tile(cols).mul_(total.view(-1, 1, d).exp().to(x.lo))
    w = TILE
    while w < C:
        (k_lo, k_hi), (q_lo, q_hi), (c_lo, c_hi) = (halves(y, w) for y in (*rows, cols))
        before, after = total.view(-1, 2, 1, d).exp().to(x.lo).unbind(1)
        if keep is not None:
            keep.append((w, k_hi.clone(), q_hi.clone(), c_lo.clone(), before, after))
        T_lo, T_hi = T.view(-1, 2, w, w).unbind(1)
        product = lambda r: mm(r, c_lo.mT, out=torch.empty_like(T_lo, dtype=x.acc)).to(x.hi)
        step = torch.bmm(T_hi, product(k_hi))
        T, A = on_diagonal(T), on_diagonal(A)
        mm(step, T_lo, out=T[:, w:, :w], beta=0, alpha=-1)
        A[:, w:, :w] = product(q_hi)
        rows.view(2, -1, 2, w, d)[:, :, 1].mul_(before)
        c_lo.mul_(after)
        total = total.view(n, -1, 2, d).sum(2)
        w *= 2
    return rows, cols, T, A, total


def maps(x, rows, cols, T, A, total):
    """A chunk is affine in its first state: o = Xq v + R S and S_next = Xk' v - M S; returns Xq, Xk, R, M."""
    Xq, Xk = torch.bmm(A, T).to(x.lo), torch.bmm(T.mT, cols.to(x.hi)).to(x.lo)
    M = mm(Xk.mT, rows[0], out=torch.empty(len(Xk), *2 * Xk.shape[-1:], dtype=x.acc, device=A.device))
    M.diagonal(dim1=1, dim2=2).sub_(total.squeeze(1).exp())
    R = rows[1].baddbmm_(Xq, rows[0], alpha=-1)
    return Xq, Xk, R, M


def scan(states, M, reverse=False):
    """Every map applied in turn: states [chunks + 1, B * H, dk, dv] holds what each adds, and ends as the states."""
    M = M.view(len(states) - 1, -1, *M.shape[1:])
    for c in reversed(range(len(M))) if reverse else range(len(M)):
        m, source, target = (M[c].mT, c + 1, c) if reverse else (M[c], c, c + 1)
        states[target].baddbmm_(m, states[source], alpha=-1)


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale):
        ctx.save_for_backward(q, k, v, g, beta, S)
        ctx.scale, x = scale, _Layout(v)
        q, k, value = (x.turn(x.pad(y).to(x.lo)) for y in (q, k, v))
        E, total = decays(x, g)
        local = build(x, q, k, E, x.turn(x.pad(beta.to(x.acc).unsqueeze(-1))), total)
        del q, k, E
        Xq, Xk, R, M = maps(x, *local)
        states = S.new_empty(x.shape[0] + 1, *S.flatten(0, 1).shape)
        states[0] = S.flatten(0, 1)
        mm(Xk.mT, value, out=states[1:].flatten(0, 1))
        scan(states, M)
        o = mm(Xq, value, out=torch.empty_like(value), beta=0, alpha=scale)
        o.baddbmm_(R, states[:-1].flatten(0, 1).to(x.lo), alpha=scale)
        return x.back(o, v.dtype), states[-1].view_as(S).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        *_, S0 = ctx.saved_tensors
        dtypes = [y.dtype for y in ctx.saved_tensors]
        q, k, v, g, beta, S0 = ctx.saved_tensors
        x, d = _Layout(v), q.shape[-1]
        q, k, v, do = (x.turn(x.pad(y).to(x.lo)) for y in (q, k, v, do))
        do *= ctx.scale
        E, total = decays(x, g)
        beta = x.turn(x.pad(beta.to(x.acc).unsqueeze(-1)))
        keep = []
        rows, cols, T, A, decay = build(x, q, k, E, beta, total, keep)
        Xq, Xk, R, M = maps(x, rows, cols, T, A, decay)
        S, D = (y.new_empty(x.shape[0] + 1, *y.flatten(0, 1).shape) for y in (S0, S0))
        S[0], D[-1] = S0.flatten(0, 1), dS.flatten(0, 1)
        mm(Xk.mT, v, out=S[1:].flatten(0, 1))
        mm(R.mT, do, out=D[:-1].flatten(0, 1))
        scan(S, M)
        scan(D, M, reverse=True)
        dS, S, D = D[0].view_as(S0), S[:-1].flatten(0, 1), D[1:].flatten(0, 1)
        dtotal = decay.squeeze(1).exp() * (S * D).sum(-1)
        S, D = S.to(x.lo), D.to(x.lo)
        r = torch.baddbmm(v, rows[0], S, alpha=-1)
        u, dr = torch.bmm(T.to(x.lo), r), torch.baddbmm(torch.bmm(Xq.mT, do), Xk, D)
        dbeta = (dr.to(x.acc) * u / beta.square().clamp_min(1e-30)).sum(-1, keepdim=True)
        own = (do.to(x.acc) * u).sum(-1, keepdim=True).to(x.lo)             # q_i . k_i carries no decay
        dA = torch.stack([-torch.bmm(dr, u.mT), torch.bmm(do, u.mT)]).tril_(-1)
        drows = torch.stack([-torch.bmm(dr, S.mT), torch.bmm(do, S.mT)])
        dend = torch.bmm(u, D.mT)
        dg = (cols * dend).to(x.acc)
        dg = dg.cumsum(1) - dg + dtotal.unsqueeze(1)      # a state's decay meets what was written before
        dcols = torch.zeros_like(cols)
        for w, k_hi, q_hi, c_lo, before, after in reversed(keep):
            drows.view(2, -1, 2, w, d)[:, :, 1].mul_(before)
            halves(dcols, w)[0].mul_(after)
            dk_, dq_ = blocks(dA, w)
            halves(drows[0], w)[1].baddbmm_(dk_, c_lo)
            halves(drows[1], w)[1].baddbmm_(dq_, c_lo)
            halves(dcols, w)[0].baddbmm_(dk_.mT, k_hi).baddbmm_(dq_.mT, q_hi)
        tile = lambda y: y.view(-1, TILE, y.shape[-1])
        inv = k / E
        rows = torch.stack([k * E, q * E])
        dk_, dq_ = (y.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE)).diagonal(0, 1, 3).movedim(-1, 1).reshape(-1, TILE, TILE) for y in dA)
        f32 = lambda a, b: mm(a, b, out=torch.empty(*a.shape[:2], b.shape[-1], dtype=x.acc, device=a.device)).view(k.shape)
        drk = f32(dk_, tile(inv)) + drows[0]
        drq = f32(dq_, tile(inv)) + drows[1]
        after = tile_after(total)
        tot = total.exp().view(-1, 1, d)
        dc = f32(dk_.mT, tile(rows[0])) + f32(dq_.mT, tile(rows[1])) + (tile(dcols) * tot).view_as(k)
        dG = rows[0] * drk + rows[1] * drq - inv * dc
        dg += dG.sum(1, keepdim=True) + dG - dG.cumsum(1)
        dc += (tile(dend) * after.exp().view(-1, 1, d)).view_as(k)
        dq = drq * E + own * k
        dk = drk * E + dc / E + own * q
        back = lambda y, t: x.back(y.to(t), t)
        return (*(back(y, t) for y, t in zip((dq, dk, dr, dg), dtypes)), back(dbeta, dtypes[4]).squeeze(-1), dS, None)


def blocks(dA, w):
    """The w x w blocks left of the diagonal, of both matrices of dA [2, n, C, C], as [n * C / 2w, w, w] each."""
    C = dA.shape[-1]
    low = dA.view(2, -1, C // (2 * w), 2, w, C // (2 * w), 2, w)[:, :, :, 1, :, :, 0].diagonal(0, 2, 4)
    return low.movedim(-1, 2).reshape(2, -1, w, w)


def tile_after(total):
    """The log-decay from each tile's start to the chunk's end, from the tiles' totals [n, tiles, d]."""
    return total.flip(1).cumsum(1).flip(1)


class _Gather(torch.autograd.Function):
    """x[index] whose gradient is gathered back too, by `back` [len(x), repeats]: no atomics, one fixed order."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, dy):
        (back,) = ctx.saved_tensors
        return dy.index_select(0, back.flatten()).unflatten(0, back.shape).sum(1), None, None


def situ(gate, up):
    gate, up = gate.float(), up.float()
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))


def experts_grouped(x, experts, weights, w1, w3, w2, act=None):
    act = act or situ
    m, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(m * k, device=x.device)).view(m, k)
    ends = torch.searchsorted(chosen, torch.arange(len(w1), device=x.device), right=True, out_int32=True)
    rows = _Gather.apply(x, order // k, back)
    share = _Gather.apply(weights.flatten(), order, back.view(-1, 1)).unsqueeze(-1)
    product = lambda a, w: F.grouped_mm(a, w.mT, offs=ends)
    h = (act(product(rows, w1), product(rows, w3)) * share).to(x.dtype)
    y = product(h, w2)
    return _Gather.apply(y, back.flatten(), order.view(-1, 1)).unflatten(0, (m, k)).sum(1)
