"""Fast twins of k3.py's plain paths in PyTorch operations: no Triton, no torch.compile, no C++.

    kda_chunk        twin of kda_recurrent: chunks of tokens as maps of the state     [§2.1.1]
    experts_grouped  twin of the loop over experts: sorted tokens, grouped matmuls    [§2.3.1]
    rms_norm, l2_norm, short_conv, situ_glu, attn_res    twins of the same names

On a GPU nothing asks the device for a number and every shape follows from the arguments' shapes, so
that a CUDA graph holds forward and backward. Nothing is summed by atomics: the same inputs give
the same bits.

Three habits pay for most of the speed. A matmul writes its result where it is wanted (`out=`, also
into a block of a larger matrix). Elementwise work runs on contiguous tensors of one dtype, the only
case that PyTorch vectorises: where a factor is shared by many tokens, writing it out for each of
them first is cheaper (`spread`). A copy that reorders moves 16 bytes at a time (`reorder`).

    python kernels.py        times kda_chunk on this machine, on a GPU experts_grouped too
"""
import math
import time

import torch
import torch.nn.functional as F

TILE = 16            # tokens whose decays are divided by each other
G_MIN = -80 / TILE   # strongest log-decay of a step: fp32 and bf16 end at e^88
CHUNK = 128          # tokens of one map of the state: longer chunks, shorter scan, more work inside
                     # a chunk. A CPU is quick to launch: there half as many as the values are wide


# ---- Kimi Delta Attention by chunks

def kda_chunk(q, k, v, g, beta, S=None, scale=None):
    """Chunkwise KDA, the map of kda_recurrent.  [§2.1.1, Eqs. 3-4]

    q, k  (B, T, H, dk)   unit length along dk
    v     (B, T, H, dv)
    g     (B, T, H, dk)   log-decay of one step, in [G_MIN, 0], fp32; without that bound the
                          quotients overflow, and kda_recurrent is the way
    beta  (B, T, H)       write strength in (0, 1), already through the sigmoid
    S     (B, H, dk, dv)  state before the first token, fp32; None means zeros
    Returns o (B, T, H, dv) in v's dtype and the final S in fp32 (float64 for float64). Any T; the
    S handed in is left as it was.

    On a GPU 16-bit inputs are multiplied as bf16 and summed in fp32; decays, the tiles' inverses
    and the state are fp32. Floor at B 1, T 8192, H 96, d 128, bf16: 1.2 GB read or written once,
    0.28 ms on one H200. Spent there, forward, in ms: load 0.9 (12 passes over a tensor of 0.2 GB),
    tiles 1.4 (16), doubling 16 to 128 2.1 (3 x 8), Xk and Xq 0.3 (6), M and Xk' v 0.5 (8), scan 1.0
    (64 steps), outputs 0.8 (12). The inputs and the state before each chunk, in bf16, are kept for
    the backward, which builds the chunks again.
    """
    B, T, H, dk = q.shape
    shapes = [tuple(y.shape) for y in (q, k, v, g, beta)]
    assert q.shape == k.shape == g.shape and v.shape[:3] == beta.shape == (B, T, H), shapes
    acc = torch.promote_types(v.dtype, torch.float32)
    S = v.new_zeros(B, H, dk, v.shape[-1], dtype=acc) if S is None else S.to(acc)
    if not v.numel():
        return v.clone(), S.clone()
    return _KDAChunk.apply(q, k, v, g, beta, S, dk**-0.5 if scale is None else scale)


def mm(a, b, out, beta=0, alpha=1):
    """out = beta * out + alpha * a @ b, batched, summed in fp32, rounded once to out's dtype."""
    if out.is_cuda or out.is_contiguous():
        wide = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
        return torch.baddbmm(out, a, b, **wide, beta=beta, alpha=alpha, out=out)
    product = torch.bmm(a, b).mul_(alpha)      # a CPU's baddbmm takes a strided out one by one
    return out.copy_(product.add_(out, alpha=beta) if beta else product)


def reorder(new, x):
    """new.copy_(x), 16 bytes at a time where possible: it costs by the element, not the byte."""
    size = x.element_size()
    if new.dtype == x.dtype and all(y.stride(-1) == 1 and y.shape[-1] * size % 16 == 0
                                    and y.storage_offset() * size % 16 == 0 for y in (new, x)):
        new.view(torch.complex128).copy_(x.view(torch.complex128))
        return new
    return new.copy_(x)


def spread(x, w):
    """x [..., 1, d] written w times: a product with it is one pass that vectorises."""
    shape = *x.shape[:-2], w, x.shape[-1]
    return reorder(torch.empty(shape, dtype=x.dtype, device=x.device), x.expand(shape))


def tiles(x):
    return x.view(-1, TILE, x.shape[-1])


def halves(x, w):
    """The even and the odd runs of w tokens of x [chunks, C, d], each [runs, w, d] (views)."""
    return x.view(-1, 2, w, x.shape[-1]).unbind(1)


def squares(like, dtype, make=torch.zeros):
    """A C x C matrix for each chunk of `like`, with a spare row after each: so the w x w blocks on
    the diagonals of all of them lie one stride apart, one batch for a matmul."""
    n, C, _ = like.shape
    return make(n, C + 1, C, dtype=dtype, device=like.device)[:, :C]


def diagonal(x, w):
    """The w x w blocks on the diagonals of squares (a view)."""
    C = x.shape[-1]
    shape, stride = (len(x) * C // w, w, w), (w * (C + 1), C, 1)
    return x.as_strided(shape, stride, x.storage_offset())


def below(x, w):
    """Of every 2w x 2w block on the diagonals of squares, the w x w one below left (a view)."""
    C = x.shape[-1]
    shape, stride = (len(x) * C // (2 * w), w, w), (2 * w * (C + 1), C, 1)
    return x.as_strided(shape, stride, x.storage_offset() + w * C)


class _Layout:
    """[B, T, H, d] to [chunks * B * H, C, d] and back; a step of the scan is then one slice."""

    def __init__(self, v):
        B, T, H, d = v.shape
        longest = CHUNK if v.is_cuda else 1 << max(2, (d // 2).bit_length() - 1)
        self.C = max(TILE, min(longest, 1 << (T - 1).bit_length()))
        self.T, self.shape = T, (-(-T // self.C), B, H)
        self.acc = torch.promote_types(v.dtype, torch.float32)
        half = v.is_cuda and v.element_size() == 2          # on a CPU it would gain nothing
        self.lo = torch.bfloat16 if half else self.acc      # operands; fp16 cannot hold e^80

    def pad(self, x):
        pad = -self.T % self.C
        return (F.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x).contiguous()      # no decay, no write

    def turn(self, x):
        x = x.unflatten(1, (self.shape[0], -1)).permute(1, 0, 3, 2, 4)
        return reorder(torch.empty(x.shape, dtype=x.dtype, device=x.device), x).flatten(0, 2)

    def back(self, x, dtype):
        x = x.view(*self.shape, *x.shape[1:]).permute(1, 0, 3, 2, 4)
        new = reorder(torch.empty(x.shape, dtype=dtype, device=x.device), x)
        return new.flatten(1, 2)[:, :self.T]


def load(lay, q, k, v, g, beta):
    """q, k, v and beta by chunks; of g two things: E, the decay from a tile's start to each of its
    tokens, and each tile's total log-decay."""
    q, k, v = (lay.turn(lay.pad(y).to(lay.lo)) for y in (q, k, v))
    G = lay.pad(g.to(lay.acc)).unflatten(1, (-1, TILE)).cumsum(2)
    total = lay.turn(G[:, :, -1].contiguous())
    E = torch.exp(G, out=torch.empty(G.shape, dtype=lay.lo, device=G.device)).flatten(1, 2)
    return q, k, v, lay.turn(E), total, lay.turn(lay.pad(beta.to(lay.acc).unsqueeze(-1)))


def build(lay, q, k, E, total, beta, keep=None):
    """Every chunk as a map of the state S that enters it: K, Q, c, T, B and the chunk's decay.

    Its tokens write u = T (v - K S), T = (1/beta + A)^-1, A = tril(k k', -1) with the decay between
    the two tokens in each product, and read o = Q S + B u, B = tril(q k'). It leaves
    decay * S + c' u. K and Q (rows) are k and q decayed since its start, c is k decayed until its
    end: so Xk = T' c and Xq = B T make it one map of S and v.

    A and B of a tile are dense products, its T is solved row by row. Doubling does the rest: of two
    neighbouring blocks the later one's rows times the earlier one's c' are A's or B's block below
    left, T's is -T1 A T0; then one side's decays grow by the other side's total. keep, a list,
    collects each level's factors for the backward.
    """
    n, C, d = k.shape
    rows, c = torch.empty(2, n, C, d, dtype=k.dtype, device=k.device), k / E
    torch.mul(k, E, out=rows[0])
    torch.mul(q, E, out=rows[1])
    T, B = squares(k, lay.lo), squares(k, lay.lo)
    L = torch.empty(n * C // TILE, TILE, TILE, dtype=lay.acc, device=k.device)
    mm(tiles(rows[0]), tiles(c).mT, L).mul_(tiles(beta))
    mm(tiles(rows[1]), tiles(c).mT, diagonal(B, TILE)).tril_()
    one = torch.diag_embed(beta.view(-1, TILE))      # (1 + beta k k') T = beta, solved row by row
    diagonal(T, TILE).copy_(torch.linalg.solve_triangular(L, one, upper=False, unitriangular=True))
    tiles(c).mul_(spread(total.view(-1, 1, d).exp().to(lay.lo), TILE))
    w = TILE
    while w < C:
        (k_hi, q_hi), c_lo = (halves(y, w)[1] for y in rows), halves(c, w)[0]
        before, after = total.view(-1, 2, 1, d).exp().to(lay.lo).unbind(1)
        T0, T1 = diagonal(T, w).unflatten(0, (-1, 2)).unbind(1)
        mm(T1, torch.bmm(torch.bmm(k_hi, c_lo.mT), T0), below(T, w), alpha=-1)
        mm(q_hi, c_lo.mT, below(B, w))
        if keep is not None:
            saved = (reorder(torch.empty_like(y, memory_format=torch.contiguous_format), y)
                     for y in (k_hi, q_hi, c_lo))
            keep.append((w, *saved, before, after))
        k_hi.mul_(before)
        q_hi.mul_(before)
        c_lo.mul_(after)
        total = total.view(n, -1, 2, d).sum(2)
        w *= 2
    return rows, c, T, B, total.squeeze(1).exp()


def transition(lay, Xk, K, decay):
    """M of S_next = Xk' v - M S."""
    M = torch.empty(len(Xk), *2 * Xk.shape[-1:], dtype=lay.acc, device=Xk.device)
    mm(Xk.mT, K, M).diagonal(dim1=1, dim2=2).sub_(decay)
    return M


def scan(states, M, reverse=False):
    """states [chunks + 1, B * H, dk, dv] starts as what each chunk adds and ends as the states."""
    M = M.view(len(states) - 1, -1, *M.shape[1:])
    for c in reversed(range(len(M))) if reverse else range(len(M)):
        m, source, target = (M[c].mT, c + 1, c) if reverse else (M[c], c, c + 1)
        states[target].baddbmm_(m, states[source], alpha=-1)


def descend(keep, dA, dB, drows, dc):
    """Takes the gradients of rows and c back from the chunk's ends to each tile's, in place, and
    adds those of each level's products."""
    while keep:
        w, k_hi, q_hi, c_lo, *decays = keep.pop()
        before, after = (decay.to(dc.dtype) for decay in decays)     # of one dtype: less slow
        dc_lo = halves(dc, w)[0].mul_(after)
        for dX, hi, drow in zip((dA, dB), (k_hi, q_hi), drows):
            mm(below(dX, w), c_lo, halves(drow, w)[1].mul_(before), beta=1)
            mm(below(dX, w).mT, hi, dc_lo, beta=1)


def by_tile(lay, y):
    return tiles(y).sum(1, dtype=lay.acc).view(len(y), -1, y.shape[-1])


def decay_gradient(lay, dtotal, past, pairs):
    """Gradient of each log-decay: the sum over all that it decays.

    dtotal  [n, d]      the state, on its way through the chunk
    past    [n, C, d]   what a token wrote, on its way out: meets the decays of the tokens after it
    pairs   [n, C, d]   row * drow - c * dc, fp32: summed from a token to the chunk's end, the
                        products between an earlier and a later token; one between two later
                        tokens comes with both signs, and would not cancel in bf16
    Sums over a whole chunk would drown a strong decay's gradient in rounding, so they run over
    tiles first, and in a tile over its own tokens.
    """
    carried = torch.cat([dtotal.unsqueeze(1), by_tile(lay, past)[:, :-1]], 1).cumsum(1)
    carried[:, :-1] += by_tile(lay, pairs)[:, 1:].flip(1).cumsum(1).flip(1)
    tiles(pairs)[:, -1] += carried.flatten(0, 1)
    on = torch.ones(TILE, TILE, dtype=lay.acc, device=past.device)
    dg = torch.matmul(on.triu(), tiles(pairs)).view(past.shape)
    before = torch.block_diag(*[on.tril(-1).to(lay.lo)] * (lay.C // TILE))
    return mm(before.expand(len(past), -1, -1), past, dg, beta=1)


class _KDAChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale):
        ctx.scale, lay, inputs = scale, _Layout(v), (q, k, v, g, beta)
        q, k, v, *local = load(lay, *inputs)
        (K, Q), c, T, B, decay = build(lay, q, k, *local)
        Xk, Xq = torch.bmm(T.mT, c), torch.bmm(B, T)
        del q, k, local, c, T, B
        M = transition(lay, Xk, K, decay)
        states = S.new_empty(lay.shape[0] + 1, *S.flatten(0, 1).shape)
        states[0] = S.flatten(0, 1)
        mm(Xk.mT, v, states[1:].flatten(0, 1))
        scan(states, M)
        del M, Xk
        low = states.to(lay.lo)
        ctx.save_for_backward(*inputs, low)
        o = mm(Xq, v, torch.empty_like(v), alpha=scale)
        o.baddbmm_(Q.baddbmm_(Xq, K, alpha=-1), low[:-1].flatten(0, 1), alpha=scale)
        return lay.back(o, inputs[2].dtype), states[-1].view_as(S).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        """D: gradient of the state after each chunk; u: what a token writes; dr: gradient of
        v - K S. A product in A has the gradient -dr u', one in B do u'.
        """
        *inputs, S = ctx.saved_tensors
        lay, keep = _Layout(inputs[2]), []
        q, k, v, E, total, beta = load(lay, *inputs)
        do = lay.turn(lay.pad(do).to(lay.lo)).mul_(ctx.scale)
        (K, Q), c, T, B, decay = build(lay, q, k, E, total, beta, keep)
        Xk, Xq = torch.bmm(T.mT, c), torch.bmm(B, T)
        del B
        M = transition(lay, Xk, K, decay)
        D = dS.new_empty(*S.shape, dtype=lay.acc)
        D[-1] = dS.flatten(0, 1)
        mm(Q.baddbmm_(Xq, K, alpha=-1).mT, do, D[:-1].flatten(0, 1))
        scan(D, M, reverse=True)
        dS, D, S = D[0].clone(), D[1:].flatten(0, 1).to(lay.lo), S[:-1].flatten(0, 1)
        del M
        dr = torch.bmm(Xq.mT, do).baddbmm_(Xk, D)
        u = torch.bmm(T, v.baddbmm_(K, S, alpha=-1))
        del Xq, Xk, T, K, Q
        dtotal = decay * (S * D).sum(-1, dtype=lay.acc)
        dA, dB = (squares(u, lay.lo, torch.empty) for _ in range(2))
        mm(dr, u.mT, dA, alpha=-1)
        mm(do, u.mT, dB)
        drows = torch.empty(2, *k.shape, dtype=lay.acc, device=k.device)
        mm(dr, S.mT, drows[0], alpha=-1)
        mm(do, S.mT, drows[1])
        dend, dc = torch.bmm(u, D.mT), torch.zeros_like(k, dtype=lay.acc)
        past = c.mul_(dend)
        del S, D, u, do
        # (1/beta + A) u = r, so that 1/beta has the gradient -dr . u
        b = beta.clamp_min(1e-30)                       # 0 where there is no token
        dbeta = -dA.diagonal(dim1=1, dim2=2).unsqueeze(-1) / b / b
        width = math.gcd(k.shape[-1], 8)                # q . k of one token: no decay in it
        own = dB.diagonal(dim1=1, dim2=2).reshape(-1, 1, 1).repeat(1, 1, width)
        own = spread(own, k.shape[-1] // width).view_as(k)
        descend(keep, dA, dB, drows, dc)
        later = total.flip(1).cumsum(1).flip(1)       # from each tile's start to the chunk's end
        for y, decay in ((dc, total), (dend, later)):
            tiles(y).mul_(spread(decay.view(-1, 1, k.shape[-1]).exp().to(lay.lo), TILE))
        rk, rq, ck = k * E, q * E, k / E
        da, db = (diagonal(y, TILE).tril(-1) for y in (dA, dB))
        mm(da, tiles(ck), tiles(drows[0]), beta=1)
        mm(db, tiles(ck), tiles(drows[1]), beta=1)
        mm(da.mT, tiles(rk), tiles(dc), beta=1)
        mm(db.mT, tiles(rq), tiles(dc), beta=1)
        pairs = (rk * drows[0]).addcmul_(rq, drows[1]).addcmul_(ck, dc, value=-1)
        dg = decay_gradient(lay, dtotal, past, pairs)
        drows, dc = drows.to(lay.lo), dc.to(lay.lo)
        dq = drows[1].mul_(E).addcmul_(k, own)
        dk = drows[0].mul_(E).addcdiv_(dc.add_(dend), E).addcmul_(q, own)
        dq, dk, dv, dg = (lay.back(y, z.dtype) for y, z in zip((dq, dk, dr, dg), inputs))
        dbeta = lay.back(dbeta, inputs[4].dtype).squeeze(-1)
        return dq, dk, dv, dg, dbeta, dS.view(*lay.shape[1:], *dS.shape[1:]), None


# ---- Norms, convolution, SiTU-GLU, Attention Residuals: few passes, gradients written out

def rms_norm(x, weight, eps):
    """x / rms(x) over the last axis, times weight; eps is added to the mean square."""
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)       # one pass each way
    return _Norm.apply(x, weight, x.shape[-1], eps)


def l2_norm(x, eps=1e-6):
    """x / |x| over the last axis; eps is added to the square of the length."""
    d = x.shape[-1]
    if x.is_cuda:
        return F.rms_norm(x, (d,), eps=eps / d) * d**-0.5
    return _Norm.apply(x, None, 1, eps)


class _Norm(torch.autograd.Function):
    """y = x r w with r = (|x|^2 / n + eps)^-1/2, so that dx = r (w dy - x r^2 (w dy).x / n)."""

    @staticmethod
    def forward(ctx, x, weight, n, eps):
        up = x.to(torch.promote_types(x.dtype, torch.float32))
        r = torch.linalg.vector_norm(up, dim=-1, keepdim=True).square_().div_(n).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.n, y = n, (up * r).to(x.dtype)
        return y if weight is None else y.mul_(weight.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, r = ctx.saved_tensors
        up, dy, dw = x.to(r.dtype), dy.to(r.dtype), None
        each = dy * up
        if weight is None:
            along = each.sum(-1, keepdim=True)
        else:
            w = weight.to(r.dtype)
            along, dy = (each @ w).unsqueeze(-1), dy * w
            dw = (r.flatten() @ each.reshape(-1, len(w))).to(weight.dtype)
        dx = torch.addcmul(dy, up, along * r.square() / -ctx.n, out=each).mul_(r)
        return dx.to(x.dtype), dw, None, None


def short_conv(x, weight, tail=None):
    """Causal depthwise convolution over time, then SiLU.  [§2.1.1]

    x (B, T, C), weight (C, 1, W), tail (B, W - 1, C): what stood before x; None means zeros.
    Returns the activations in x's dtype, and the tail for what follows.
    """
    W, T = weight.shape[-1], x.shape[1]
    assert tail is None or tail.shape[1] == W - 1, f"tail {list(tail.shape)} of {W} taps"
    x = F.pad(x, (0, 0, W - 1, 0)) if tail is None else torch.cat([tail, x], 1)
    return _ShortConv.apply(x, weight.flatten(1).t()), x[:, T:]


class _ShortConv(torch.autograd.Function):
    """taps (W, C) over x (B, W - 1 + T, C)."""

    @staticmethod
    def forward(ctx, x, taps):
        acc, T = torch.promote_types(x.dtype, torch.float32), x.shape[1] - len(taps) + 1
        up, taps = x.to(acc), taps.to(acc).contiguous()
        y = up[:, :T] * taps[0]
        for j in range(1, len(taps)):
            y.addcmul_(up[:, j:j + T], taps[j])
        ctx.save_for_backward(x, taps, y)
        return F.silu(y).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, taps, y = ctx.saved_tensors
        T, up, dx = y.shape[1], x.to(y.dtype), torch.zeros(x.shape, dtype=y.dtype, device=y.device)
        g, dtaps = torch.ops.aten.silu_backward(dy.to(y.dtype), y), torch.empty_like(taps)
        for j, tap in enumerate(taps):
            dx[:, j:j + T].addcmul_(g, tap)
            torch.sum(up[:, j:j + T] * g, (0, 1), out=dtaps[j])
        return dx.to(x.dtype), dtaps


def situ_glu(gate, up, gate_cap=4.0, up_cap=25.0):
    """gate_cap tanh(gate / gate_cap) sigmoid(gate) up_cap tanh(up / up_cap).  [§2.3.2, Eq. 12]"""
    return _SituGLU.apply(gate, up, gate_cap, up_cap)


def squash(x, cap):
    """tanh(x / cap), on a CPU by expm1, which takes half as long there."""
    if x.is_cuda:
        return torch.tanh(x / cap)
    e = (x * (2 / cap)).expm1_()
    return e.reciprocal_().add_(0.5).reciprocal_().mul_(0.5)       # e / (e + 2), e = inf included


class _SituGLU(torch.autograd.Function):
    """The caps multiply at the end; the gate's slope is made while its parts are there."""

    @staticmethod
    def forward(ctx, gate, up, gate_cap, up_cap):
        acc = torch.promote_types(gate.dtype, torch.float32)
        gate, up, ctx.dtype = gate.to(acc), up.to(acc), gate.dtype
        s, t, u = gate.sigmoid(), squash(gate, gate_cap), squash(up, up_cap)
        slope = None
        if any(ctx.needs_input_grad):
            slope = torch.ops.aten.tanh_backward(s, t)                     # s (1 - t^2)
            slope.add_(torch.ops.aten.sigmoid_backward(t, s), alpha=gate_cap)      # t s (1 - s)
        silu = s.mul_(t)
        ctx.save_for_backward(silu, slope, u)
        ctx.caps = gate_cap, up_cap
        return (silu * u).mul_(gate_cap * up_cap).to(ctx.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (silu, slope, u), (gate_cap, up_cap) = ctx.saved_tensors, ctx.caps
        dy = dy.to(u.dtype)
        dup = dy * silu
        torch.ops.aten.tanh_backward(dup, u, grad_input=dup).mul_(gate_cap)
        dgate = (dy * u).mul_(slope).mul_(up_cap)
        return dgate.to(ctx.dtype), dup.to(ctx.dtype), None, None


def attn_res(sources, query, norm_weight, eps):
    """Softmax over depth, by a list of sources [..., D] that are not stacked.  [§2.2, Eqs. 8-9]"""
    acc = torch.promote_types(sources[0].dtype, torch.float32)
    return _AttnRes.apply(query.to(acc) * norm_weight.to(acc), eps, *sources)


class _AttnRes(torch.autograd.Function):
    """Each source is read twice and, for its gradient, written once; sources stay where they are.

    score = r s.w with r = 1/rms(s), so that ds = p dy + a w + b s: a and b are numbers a position.
    """

    @staticmethod
    def forward(ctx, w, eps, *sources):
        up = [s.to(w.dtype) for s in sources]
        square = torch.stack([torch.linalg.vector_norm(s, dim=-1) for s in up]).square_()
        r, dot = (square / len(w) + eps).rsqrt_(), torch.stack([s @ w for s in up])
        p = (r * dot).softmax(0)
        ctx.save_for_backward(w, r, dot, p, *sources)
        y = up[0] * p[0].unsqueeze(-1)
        for s, share in zip(up[1:], p[1:]):
            y.addcmul_(s, share.unsqueeze(-1))
        return y.to(sources[0].dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        w, r, dot, p, *sources = ctx.saved_tensors
        g, up = dy.to(w.dtype), [s.to(w.dtype) for s in sources]
        dp = torch.stack([(g * s).sum(-1) for s in up])
        dscore = p * (dp - (p * dp).sum(0))
        a = dscore * r
        b = a * dot * r.square() / -len(w)
        dw = sum(one.flatten() @ s.reshape(-1, len(w)) for one, s in zip(a, up))
        p, a, b = (y.unsqueeze(-1) for y in (p, a, b))
        ds = [(g * p[i]).addcmul_(s, b[i]).addcmul_(a[i], w) for i, s in enumerate(up)]
        return dw, None, *(d.to(s.dtype) for d, s in zip(ds, sources))


# ---- experts

class _Gather(torch.autograd.Function):
    """x[index]; its gradient sums each row's uses [len(x), n]: no atomics, one order."""

    @staticmethod
    def forward(ctx, x, index, uses):
        ctx.save_for_backward(index, uses)
        return F.embedding(index, x)

    @staticmethod
    def backward(ctx, dy):
        index, uses = ctx.saved_tensors
        return _Collect.apply(dy, uses, index), None, None


class _Collect(torch.autograd.Function):
    """The other way round: sums y's rows, uses [m, n], without holding the n apart."""

    @staticmethod
    def forward(ctx, y, uses, index):
        ctx.save_for_backward(index, uses)
        return F.embedding_bag(uses, y.flatten(0, -2), mode="sum")

    @staticmethod
    def backward(ctx, dy):
        index, uses = ctx.saved_tensors
        return _Gather.apply(dy, index, uses), None, None


def _mxfp4(packed, scale, slice_=32):
    """[E, out, in/2] and [E, out, in/32], both u8, to [E, out, in] bf16 by a table of the two
    values of every (scale, byte); the 4-byte indices of slice_ experts exist at a time."""
    byte = torch.arange(256, device=packed.device)
    nibble = torch.stack([byte & 15, byte >> 4], -1)      # bits s e e m, low one first
    e, m = nibble >> 1 & 3, (nibble & 1) / 2
    pair = torch.where(e > 0, (1 + m) * torch.exp2(e - 1.0), m).copysign(7.5 - nibble)
    power = torch.exp2(byte.double() - 127).masked_fill_(byte == 255, float("nan"))
    table = (power[:, None, None] * pair).bfloat16().view(torch.int32).flatten()
    new = torch.empty(packed.shape, dtype=torch.int32, device=packed.device)    # two bf16 each
    for a in range(0, len(packed), slice_):
        part = slice(a, a + slice_)
        index = scale[part].int().mul_(256).unsqueeze(-1) + packed[part].unflatten(-1, (-1, 16))
        torch.index_select(table, 0, index.flatten(), out=new[part].flatten())
    return new.view(torch.bfloat16)


def _blocks(ends, rows, static):
    """The sorted rows in blocks of one expert each, for a batched product instead of a grouped one.

    ends    (E,)  where each expert's run ends among them
    static  as many blocks as there may be, so that no shape depends on a number
    Returns each block's expert, or None where every expert has one; the row at each place
    (blocks, size); whether it is there: spare places, after a run's end, hold its last row again.
    """
    counts = ends.diff(prepend=ends[:1] * 0)
    size = 16 if static else min(int(counts.max()), 3 * rows // (2 * len(ends)) + 1)
    each = (counts + size - 1) // size
    n = rows // size + len(ends) if static else int(each.sum())
    b, last = torch.arange(n, device=ends.device), each.cumsum(0)
    e = torch.searchsorted(last, b, right=True).clamp_max(len(ends) - 1)
    first = (ends - counts)[e] + size * (b - (last - each)[e])
    row = first.unsqueeze(1) + torch.arange(size, device=b.device)
    one_each, end = not static and n == len(ends) and bool((each == 1).all()), ends[e].unsqueeze(1)
    return None if one_each else e, torch.minimum(row, end - 1), row < end


def _product(rows, w, ends, e):
    """Each row times the matrix of its expert: sorted rows, or blocks whose experts are e."""
    w = (w if torch.is_tensor(w) else _mxfp4(*w)).to(rows.dtype)
    if rows.dim() == 2:
        return F.grouped_mm(rows, w.mT, offs=ends)
    if e is not None:                 # an embedding's gradient is faster than an index's
        w = F.embedding(e, w.flatten(1)).unflatten(1, w.shape[1:])
    return torch.bmm(rows, w.mT)


def experts_grouped(x, experts, weights, w1, w3, w2, act=situ_glu):
    """The routed experts' weighted sum, tokens sorted by expert.  [§2.3.1]

    x        (m, l)      what enters the experts
    experts  (m, k)      int64, the chosen ones, in any order; an expert may be chosen by no token
    weights  (m, k)      mixture weights
    w1, w3   (E, i, l)   gate and up; w2 (E, l, i) down. Each may be the checkpoint's pair
                         (packed, scale) instead, decoded to bf16, one of the three at a time
    act      (gate, up) -> hidden; the default is SiTU-GLU with caps 4 and 25, in fp32
    Returns (m, l). The weight multiplies the hidden vector, which is rounded there anyway, not the
    expert's output. On a GPU dtypes other than bfloat16 are for small models: they copy matrices.
    """
    m, k = experts.shape
    if m == 0:
        return x.clone()
    chosen, order = experts.flatten().sort(stable=True)
    packed = isinstance(w1, tuple)
    every = torch.arange(len(w1[0] if packed else w1), device=x.device)
    if packed and m * k < len(every):        # only the chosen ones are decoded, each for one row
        w1, w3, w2 = ([y.index_select(0, chosen) for y in w] for w in (w1, w3, w2))
        chosen = every = every[:m * k]
    ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
    if x.is_cuda and x.dtype == torch.bfloat16:      # of others grouped_mm reads the sizes back
        e, slot, there = None, order, torch.ones_like(order, dtype=torch.bool)
    else:
        e, row, there = _blocks(ends, m * k, static=x.is_cuda)
        slot = order[row]
    at = torch.arange(slot.numel(), device=x.device)
    place = at.new_empty(m * k + 1).scatter_(0, slot.where(there, m * k).flatten(), at)[:-1]
    rows = _Gather.apply(x, slot // k, place.view(m, k))
    share = _Gather.apply(weights.reshape(-1, 1), slot, place.view(-1, 1)) * there.unsqueeze(-1)
    h = act(_product(rows, w1, ends, e), _product(rows, w3, ends, e))
    y = _product((h * share).to(x.dtype), w2, ends, e)
    return _Collect.apply(y, place.view(m, k), slot // k)


# ---- timing

def _ms(fn, times=11):
    """Median times of fn() in ms: called, and on a GPU also as a CUDA graph."""
    fn()
    if not torch.cuda.is_available():
        clock = [time.perf_counter()]
        for _ in range(times):
            fn()
            clock.append(time.perf_counter())
        return [sorted(b - a for a, b in zip(clock, clock[1:]))[times // 2] * 1e3]
    side, graph, medians = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(side):
        fn()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        fn()
    for run in (fn, graph.replay):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        for mark in marks:
            run()
            mark.record()
        torch.cuda.synchronize()
        medians.append(sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))[times // 2])
    return medians


def _show(what, fn):
    print(f"{what:62s}", *(f"{ms:9.2f} ms" for ms in _ms(fn)), flush=True)


def _time_kda(B, T, H, d, device, dtype):
    rand = lambda *s: torch.randn(*s, device=device)
    q, k = (F.normalize(rand(B, T, H, d), dim=-1).to(dtype) for _ in range(2))
    g, beta = -5 * torch.sigmoid(2 * rand(B, T, H, d) - 3), torch.sigmoid(rand(B, T, H))
    inputs = [y.requires_grad_() for y in (q, k, rand(B, T, H, d).to(dtype), g, beta)]
    do, what = rand(B, T, H, d).to(dtype), f"kda_chunk {B} x {T} x {H} x {d} {str(dtype)[6:]}"
    _show(f"{what}, forward", torch.no_grad()(lambda: kda_chunk(*inputs)))
    _show(f"{what}, and backward",
          lambda: torch.autograd.grad(kda_chunk(*inputs)[0], inputs, do))


def _time_experts(E, i, l, k, packed):
    byte = lambda low, high, *s: torch.randint(low, high, s, device="cuda", dtype=torch.uint8)
    if packed:
        draw = lambda o, n: (byte(0, 256, E, o, n // 2), byte(118, 122, E, o, n // 32))
    else:
        draw = lambda o, n: torch.randn(E, o, n, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    weights = [draw(i, l), draw(i, l), draw(l, i)]
    for m in (4096, 8):
        x = torch.randn(m, l, device="cuda", dtype=torch.bfloat16)
        experts = torch.rand(m, E, device="cuda").topk(k).indices
        p = torch.rand(m, k, device="cuda")
        _show(f"experts_grouped {E} x {i} x {l} {'MXFP4' if packed else 'bf16'}, {m} tokens",
              torch.no_grad()(lambda: experts_grouped(x, experts, p, *weights)))


if __name__ == "__main__":
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "torch", torch.__version__, "(called, as a CUDA graph)")
        for shape in ((1, 8192, 96, 128), (1, 2048, 96, 128), (16, 512, 4, 64)):
            _time_kda(*shape, "cuda", torch.bfloat16)
        for packed in (False, True) if torch.cuda.mem_get_info()[0] > 110e9 else ():
            _time_experts(896, 3072, 3584, 16, packed)
    else:
        print("CPU,", torch.get_num_threads(), "threads, torch", torch.__version__)
        _time_kda(1, 2048, 4, 64, "cpu", torch.float32)
