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


def times_exp(x, e, sign=1, factor=1, out=None):
    """factor * x * exp(sign * e), e <= 0, in one pass: below zero ELU's derivative is the exponential."""
    out = torch.empty_like(e) if out is None else out
    return torch.ops.aten.elu_backward.grad_input(x, sign * factor, 1, sign, False, e, grad_input=out)


def mm(a, b):
    """Batched a @ b over all leading axes, summed and returned in fp32 (float64 for float64)."""
    lead, a, b = a.shape[:-2], a.flatten(0, -3), b.flatten(0, -3)
    out = torch.bmm(a, b, out_dtype=torch.float32) if a.element_size() == 2 else torch.bmm(a, b)
    return out.unflatten(0, lead)


def halves(x, w):
    """x [..., C, d] as its even and its odd runs of w tokens, each [blocks, w, d] (a view)."""
    return x.view(-1, 2, w, x.shape[-1]).unbind(1)


def diagonal(x, w):
    """The w x w blocks on the diagonal of x [..., C, C], as a view [..., C // w, w, w]."""
    return x.unflatten(-1, (-1, w)).unflatten(-3, (-1, w)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def pair(lo, low_left, hi):
    """[[lo, 0], [low_left, hi]]."""
    n, w, _ = lo.shape
    out = lo.new_zeros(n, 2 * w, 2 * w)
    out[:, :w, :w], out[:, w:, :w], out[:, w:, w:] = lo, low_left, hi
    return out


class _Chunks:
    """One call's inputs as [chunks, B, H, C, d], and what the forward and the backward both need."""

    def __init__(self, q, k, v, g, beta, S, scale):
        B, T, H, dk = q.shape
        self.T, self.acc = T, torch.promote_types(v.dtype, torch.float32)
        self.half = v.is_cuda and v.dtype == torch.bfloat16
        self.lo = torch.float16 if self.half else self.acc          # operands of the matrix products
        self.C = C = min(CHUNK, max(TILE, 1 << (T - 1).bit_length()))
        self.scale = scale
        self.G = self.split(g.to(self.acc), True)
        self.q, self.k = self.split(q), self.split(k)
        self.beta = self.split(beta.to(self.acc).unsqueeze(-1))
        self.unit = self.size(v, S) if self.half else S.new_ones(())
        self.v = (self.split(v) / self.unit).to(self.lo)
        self.S0 = S / self.unit.squeeze(0) if self.half else S

    @staticmethod
    def size(x, S):
        """The largest magnitude of each head, [1, B, H, 1, 1]: the map is linear in v and S, so fp16 fits."""
        return torch.maximum(x.abs().amax((1, 3)), S.abs().amax((2, 3))).clamp_min(1e-30)[None, :, :, None, None]

    def split(self, x, cumulate=False):
        x = F.pad(x, (0, 0, 0, 0, 0, -self.T % self.C))
        if cumulate:
            x = x.unflatten(1, (-1, TILE)).cumsum(2).flatten(1, 2)
        return x.unflatten(1, (-1, self.C)).permute(1, 0, 3, 2, 4)

    def join(self, x):
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :self.T]

    def tile_forms(self, dtype):
        """q and k times exp(G), beta k times exp(-G): G <= 0 runs from each tile's start."""
        rk, rq, ck = (torch.empty(self.k.shape, dtype=dtype, device=self.k.device) for _ in range(3))
        times_exp(self.k, self.G, out=rk)
        times_exp(self.q, self.G, factor=self.scale, out=rq)
        times_exp(self.k * self.beta, self.G, sign=-1, out=ck)
        return rk, rq, ck

    def local(self):
        """The chunk's inverse T and its query-key products A, built by doubling blocks from tiles."""
        quotient = torch.bfloat16 if self.half else self.acc
        rk, rq, ck = self.tile_forms(quotient)
        tiles = lambda x: x.view(-1, TILE, x.shape[-1])
        A = mm(tiles(rq), tiles(ck).mT).tril_().to(self.lo)
        L = mm(tiles(rk), tiles(ck).mT).tril_(-1)
        eye = torch.eye(TILE, dtype=L.dtype, device=L.device).expand_as(L)
        inv = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True).to(self.lo)
        total = self.G[..., TILE - 1::TILE, :].contiguous()
        ck = (tiles(ck) * total.view(-1, 1, total.shape[-1]).exp()).to(self.lo).view_as(rk)
        rk, rq = rk.to(self.lo), rq.to(self.lo)
        w = TILE
        while w < self.C:
            (k_lo, k_hi), (q_lo, q_hi), (c_lo, c_hi) = (halves(x, w) for x in (rk, rq, ck))
            (t_lo, t_hi), (a_lo, a_hi) = (x.view(-1, 2, w, w).unbind(1) for x in (inv, A))
            inv = pair(t_lo, -(t_hi @ (k_hi @ c_lo.mT) @ t_lo), t_hi)
            A = pair(a_lo, q_hi @ c_lo.mT, a_hi)
            before, after = total.view(-1, 2, 1, total.shape[-1]).exp().to(self.lo).unbind(1)
            k_hi *= before
            q_hi *= before
            c_lo *= after
            total = total.unflatten(3, (-1, 2)).sum(4)
            w *= 2
        square = lambda x: x.view(*rk.shape[:-1], self.C)
        return rk, rq, ck, square(inv), square(A), total.squeeze(3)

    def maps(self, rk, rq, ck, inv, A, total, output=True):
        """A chunk is affine in the state: o = O + R S, S_next = M S + L."""
        Xq, Xk = (A.flatten(0, 2) @ inv.flatten(0, 2)).view_as(A), (inv.mT.flatten(0, 2) @ ck.flatten(0, 2)).view_as(ck)
        O = mm(Xq, self.v) if output else None
        R = (rq - mm(Xq, rk)).to(self.lo)
        M = torch.diag_embed(total.exp()) - mm(Xk.mT, rk)
        return O, R, M, mm(Xk.mT, self.v)


def scan(M, L, S, reverse=False):
    """The state before each map (after it, when the maps run in reverse), then the last one."""
    states = torch.empty(len(L) + 1, *S.shape, dtype=S.dtype, device=S.device)
    order = range(len(L) - 1, -1, -1) if reverse else range(len(L))
    at = len(L) if reverse else 0
    states[at] = S
    for c in order:
        torch.baddbmm(L[c].flatten(0, 1), M[c].flatten(0, 1), states[c + reverse].flatten(0, 1),
                      out=states[c + (not reverse)].flatten(0, 1))
    return states


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale):
        ctx.save_for_backward(q, k, v, g, beta, S)
        ctx.scale = scale
        x = _Chunks(q, k, v, g, beta, S, scale)
        O, R, M, L = x.maps(*x.local())
        S = scan(M, L, x.S0)
        o = (O + mm(R, S[:-1].to(x.lo))) * x.unit
        return x.join(o).to(v.dtype).contiguous(), S[-1] * x.unit.squeeze(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        q, k, v, g, beta, S = ctx.saved_tensors
        x = _Chunks(q, k, v, g, beta, S, ctx.scale)
        unit = x.size(do, dS) if x.half else dS.new_ones(())
        do, dS = (x.split(do) / unit).to(x.lo), dS / unit.squeeze(0)
        rk, rq, ck, inv, A, total = x.local()
        O, R, M, L = x.maps(rk, rq, ck, inv, A, total, output=False)
        S = scan(M, L, x.S0)[:-1]
        D = scan(M.mT, mm(R.mT, do), dS, reverse=True)
        dS, D = D[0], D[1:]
        Sl, Dl = S.to(x.lo), D.to(x.lo)
        h = mm(inv, (x.v - mm(rk, Sl)).to(x.lo)).to(x.lo)
        dv = mm(inv.mT, (mm(A.mT, do) + mm(ck, Dl)).to(x.lo))
        dh = dv.to(x.lo)
        da, dA = -mm(dh, h.mT).tril_(-1), mm(do, h.mT).tril_()
        da, dA = da.to(x.lo), dA.to(x.lo)
        drk, drq, dck = -mm(dh, Sl.mT), mm(do, Sl.mT), mm(h, Dl.mT)
        dtotal = total.exp() * (S * D).sum(-1)
        dg = ck * dck
        dg = dg.cumsum(3) - dg + dtotal.unsqueeze(3)       # a token's decay meets what was written before it
        own = dA.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * x.scale      # q_i . k_i carries no decay
        dA = dA.tril(-1)
        # back to the tiles
        quotient = torch.bfloat16 if x.half else x.acc
        rk, rq, ck = x.tile_forms(quotient)
        tiles = lambda y: y.view(-1, TILE, y.shape[-1])
        tot = x.G[..., TILE - 1::TILE, :].contiguous()                     # [N, B, H, tiles, dk]
        nt = x.C // TILE
        before = tot.cumsum(3) - tot
        after = tot.flip(3).cumsum(3).flip(3)                               # its own tile included
        fine = lambda y: y.view(-1, TILE, y.shape[-1])
        e = lambda y: y.exp().view(-1, 1, y.shape[-1])
        fine(drk).mul_(e(before)); fine(drq).mul_(e(before)); fine(dck).mul_(e(after))
        dkc, dck = dck, torch.zeros_like(dck)
        w = x.C // 2
        while w >= TILE:
            m = w // TILE
            grp = lambda y: y.unflatten(3, (-1, 2, m))
            t = grp(tot)
            bf = (t.cumsum(5) - t)[:, :, :, :, 1].exp().reshape(-1, 1, tot.shape[-1])
            af = t.flip(5).cumsum(5).flip(5)[:, :, :, :, 0].exp().reshape(-1, 1, tot.shape[-1])
            hi = lambda y: halves(y, w)[1].reshape(-1, TILE, y.shape[-1])
            lo = lambda y: halves(y, w)[0].reshape(-1, TILE, y.shape[-1])
            wide = lambda y: y.to(x.lo).view(-1, w, y.shape[-1])
            k_hi, q_hi, c_lo = wide(hi(rk) * bf), wide(hi(rq) * bf), wide(lo(ck) * af)
            a, aq = (diagonal(y, 2 * w)[..., w:, :w].reshape(-1, w, w) for y in (da, dA))
            up = lambda y, f: (y.view(-1, TILE, y.shape[-1]) * f).view(-1, w, y.shape[-1])
            halves(drk, w)[1].add_(up(mm(a, c_lo), bf))
            halves(drq, w)[1].add_(up(mm(aq, c_lo), bf))
            halves(dck, w)[0].add_(up(mm(a.mT, k_hi) + mm(aq.mT, q_hi), af))
            w //= 2
        a, aq = (diagonal(y, TILE).reshape(-1, TILE, TILE).to(quotient) for y in (da, dA))
        drk += mm(a, tiles(ck)).view_as(drk)
        drq += mm(aq, tiles(ck)).view_as(drk)
        dck += (mm(a.mT, tiles(rk)) + mm(aq.mT, tiles(rq))).view_as(drk)
        dG = rk * drk + rq * drq - ck * dck
        both = unit * x.unit
        dg = x.join(both * (dg + dG.sum(3, keepdim=True) + dG - dG.cumsum(3)))
        dq = x.join(both * (times_exp(drq, x.G, factor=x.scale) + own * x.beta * x.k))
        dc = times_exp(dck + dkc, x.G, sign=-1) + own * x.q
        dbeta = x.join((both * dc * x.k).sum(-1, keepdim=True)).squeeze(-1)
        dk = x.join(both * (times_exp(drk, x.G) + x.beta * dc))
        return (dq.to(q.dtype), dk.to(k.dtype), x.join(dv * unit).to(v.dtype), dg.to(g.dtype), dbeta.to(beta.dtype),
                dS * unit.squeeze(0), None)


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
