"""Train a toy Kimi K3 on real text: Per-Head Muon, Quantile Balancing, figures, a checkpoint.

    python train_tiny.py                 on the GPU if there is one, else the smaller CPU preset
    python train_tiny.py --preset cpu    2 CPU cores: 2.2 minutes, 2.08 bits per held-out byte
    python train_tiny.py --plot out      the figures again, from out/metrics.jsonl

A run leaves in --out (default out/): metrics.jsonl (a header, then one object a step), the figures,
state.pt (what --resume continues from) and checkpoint/ in the released layout.
"""
import argparse
import io
import json
import math
import os
import pickle
import platform
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "3000")    # waiting CPU threads soon yield a shared core
import numpy as np
import torch

from k3 import (Balancer, K3, K3Config, OneLine, attn_res_scores, f32, generate, load_tokenizer,
                save_byte_tokenizer, save_checkpoint)

# ---- Settings ------------------------------------------------------------------------------------

PRESETS = {     # what `model` leaves out is K3Config.tiny's
    "cpu": dict(
        steps=150, batch=48, length=96, lr=5e-3,                    # 4608 tokens a step
        log_every=10, val_every=50, save_every=50, val_windows=144, sample=200,
        model=dict(hidden_size=96, num_hidden_layers=6, intermediate_size=256,
                   linear_num_heads=3, num_attention_heads=3, q_lora_rank=64,
                   moe_intermediate_size=64, routed_expert_hidden_size=64)),
    "gpu": dict(
        steps=600, batch=32, length=1024, lr=3e-3,                  # 32,768 tokens a step
        log_every=20, val_every=200, save_every=200, val_windows=256, sample=400,
        model=dict(hidden_size=512, num_hidden_layers=12, intermediate_size=1536,
                   attn_res_block_size=4, linear_num_heads=8, linear_head_dim=64,
                   num_attention_heads=8, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64,
                   qk_rope_head_dim=32, v_head_dim=64, num_experts=64, num_experts_per_token=8,
                   moe_intermediate_size=128, routed_expert_hidden_size=256)),
}
FLOOR = 0.1           # the cosine ends at this share of the peak learning rate
HELD_OUT = 20         # every 20th file, or the last 20th of a text, is for validation
ADAMW_SIZE = 0.2      # usual RMS of AdamW's updates, to which Muon's are scaled

# ---- Data: bytes are tokens, with the ids that save_byte_tokenizer's encoding gives them ---------


def read_text(path=None):
    """The bytes to train on and the bytes held out, two uint8 arrays.

    path  a UTF-8 file, a folder (such files below it, sorted), None: the standard library's source
    """
    root = Path(path or os.path.dirname(os.__file__))
    files = sorted(root.rglob("*" if path else "*.py")) if root.is_dir() else [root]
    texts = [f.read_bytes() for f in files
             if not f.is_dir() and "site-packages" not in f.relative_to(root).parts]
    texts = [t for t in texts if t.decode(errors="ignore").encode() == t != b""]
    if len(texts) < HELD_OUT:     # too few to hold out whole files
        whole = b"".join(texts)
        cuts = [len(whole) * i // HELD_OUT for i in range(HELD_OUT + 1)]
        texts = [whole[a:b] for a, b in zip(cuts, cuts[1:])]
    held = texts[HELD_OUT - 1::HELD_OUT]
    del texts[HELD_OUT - 1::HELD_OUT]
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in (texts, held))


def unigram_bits(text):
    """Entropy of the bytes, in bits: the loss of the best model that sees no context."""
    p = np.bincount(text) / len(text)
    return float(-(p[p > 0] * np.log2(p[p > 0])).sum())


def windows(text, starts, length):
    """ids and labels [n, length] int64; a label is the next byte."""
    both = torch.from_numpy(np.stack([text[s:s + length + 1] for s in starts]).astype(np.int64))
    return both[:, :-1], both[:, 1:]


def batch(text, seed, step, size, length):
    """The windows of one step, a function of (seed, step) alone: a resumed run reads the same."""
    starts = np.random.default_rng([seed, step]).integers(len(text) - length, size=size)
    return windows(text, starts, length)


@torch.no_grad()
def bits_per_byte(model, text, run):
    """Loss over evenly spaced windows, in bits per byte."""
    model.eval()
    starts = np.linspace(0, len(text) - run["length"] - 1, run["val_windows"]).astype(int)
    losses = []
    for part in starts.reshape(-1, run["batch"]):
        ids, labels = windows(text, part, run["length"])
        losses.append(model.loss(ids.to(model.device), labels.to(model.device))[1]["main"])
    model.train()
    return torch.stack(losses).mean().item() / math.log(2)

# ---- Per-Head Muon  [§2.5] -----------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the parameter table; param's rows are heads x (rows[0] + rows[1] + ...)."""
    name: str
    param: torch.Tensor
    group: str      # "muon" or "adamw"
    heads: int
    rows: tuple


def head_split(name, names, c):
    """(heads, rows of each block in a head) of the tensors that are split, None for all others.

    By exact name: o_proj would divide as well, but its heads are columns.
    """
    path, leaf = name.removesuffix(".weight").rsplit(".", 1)
    if path.endswith(".block_sparse_moe.experts"):
        return c.num_experts, (names[name].shape[1],)
    if not path.endswith(".self_attn"):
        return None
    one = c.linear_num_heads, (c.linear_head_dim,)
    query = c.num_attention_heads, (c.qk_nope_head_dim + c.qk_rope_head_dim,)
    pair = c.num_attention_heads, (c.qk_nope_head_dim, c.v_head_dim)
    kda = {"q_proj": one, "k_proj": one, "v_proj": one}
    mla = {"q_b_proj": query, "q_proj": query, "kv_b_proj": pair}     # q_proj: without q_lora_rank
    return (kda if f"{path}.A_log" in names else mla).get(leaf)


def is_matrix(p):
    """Not a vector, a convolution [C, 1, 4] or an AttnRes query [1, D]."""
    return p.ndim > 1 and min(p.shape[-2:]) > 1


def param_table(model, optimizer="per-head-muon"):
    """Every trainable tensor once: Muon for matrices, AdamW for the rest; the router bias is none.

    optimizer  "muon" leaves the attention's matrices whole, "adamw" takes all tensors
    """
    names, table = dict(model.named_parameters()), []
    for name, p in names.items():
        split = head_split(name, names, model.config)
        if split and split[0] * sum(split[1]) != p.shape[:-1].numel():
            raise ValueError(f"{name} {list(p.shape)} is not {split[0]} heads of {split[1]} rows")
        lookup = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        muon = optimizer != "adamw" and is_matrix(p) and (split or p.ndim == 2) and not lookup
        whole = not split or optimizer == "muon" and p.ndim == 2
        heads, rows = (1, p.shape[:1]) if whole else split
        table.append(Row(name, p, "muon" if muon else "adamw", heads, tuple(rows)))
    return table


def blocks(tensor, row):
    """Views [heads, r, columns] of a tensor with row.param's shape, one for each r of row.rows."""
    return tensor.view(row.heads, sum(row.rows), tensor.shape[-1]).split(row.rows, dim=1)


def newton_schulz(G, steps=5, dtype=None):
    """Moves the singular values of each matrix of G [..., rows, cols] to about 0.68 ... 1.14.

    Each has its own norm, so that the result does not depend on its scale; zero gives zero.
    dtype  of the iteration; None: G's
    """
    X = G / G.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(G.dtype).tiny)
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1)       # below 1 only where G is zero
    tall = G.shape[-2] > G.shape[-1]
    X = (X.mT if tall else X).to(dtype or G.dtype)
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return (X.mT if tall else X).to(G.dtype)


class PerHeadMuon:
    """Muon on the blocks of the table's "muon" rows, AdamW on its others; gradients are only read.

    Blocks of one shape are orthogonalised together. Nothing waits for the device: lr is a tensor,
    and where the gradient is not finite every change is multiplied by 0: weights and momenta stay.
    clip   of the gradient's norm, all tensors together
    dtype  of newton_schulz
    state  name -> tensor, all that a resumed run needs
    """

    def __init__(self, table, lr, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                 clip=1.0, dtype=None):
        self.table, self.momentum, self.betas, self.eps = table, momentum, betas, eps
        self.weight_decay, self.clip, self.dtype = weight_decay, clip, dtype
        device = table[0].param.device
        self.lr = torch.tensor(float(lr), device=device)
        self.others = [row for row in table if row.group == "adamw"]
        self.muon = {}       # (rows, cols) -> [(table row, which of its blocks)]
        for row in table:
            for i, r in enumerate(row.rows if row.group == "muon" else ()):
                self.muon.setdefault((r, row.param.shape[-1]), []).append((row, i))
        size = sum(row.param.numel() for row in self.others)
        shapes = {"steps": (), "mean": (size,), "square": (size,)}
        for (r, cols), members in self.muon.items():
            shapes[f"momentum {r}x{cols}"] = sum(row.heads for row, _ in members), r, cols
        self.state = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    def zero_grad(self):
        for row in self.table:
            row.param.grad = None

    @torch.no_grad()
    def step(self):
        """One update from the .grad of the table's tensors (None: zero); returns their norm."""
        grads = {row.name: torch.zeros_like(row.param) if row.param.grad is None else row.param.grad
                 for row in self.table}
        norm = torch.nn.utils.get_total_norm(list(grads.values()))
        finite = norm.isfinite()
        on, share = finite.float(), self.clip / norm.clamp(min=self.clip)
        clean = lambda parts: torch.where(finite, torch.cat(parts) * share, 0.0)
        rate = self.lr * on
        decay = 1 - rate * self.weight_decay
        for (r, cols), members in self.muon.items():
            M = self.state[f"momentum {r}x{cols}"]
            G = clean([blocks(grads[row.name], row)[i] for row, i in members])
            M.lerp_(G, (1 - self.momentum) * on)
            U = newton_schulz(G.lerp(M, self.momentum), dtype=self.dtype)             # Nesterov
            U *= rate * ADAMW_SIZE * max(r, cols) ** 0.5
            for (row, i), u in zip(members, U.split([row.heads for row, _ in members])):
                blocks(row.param, row)[i].mul_(decay).sub_(u)
        if self.others:
            self.adamw(clean([grads[row.name].flatten() for row in self.others]), on, rate, decay)
        return norm

    def adamw(self, g, on, rate, decay):
        """AdamW on the other tensors, laid end to end as g; vectors do not decay."""
        steps, mean, square = (self.state[name] for name in ("steps", "mean", "square"))
        steps += on
        mean.lerp_(g, (1 - self.betas[0]) * on)
        square.lerp_(g * g, (1 - self.betas[1]) * on)
        c1, c2 = (1 - beta ** steps.clamp(min=1) for beta in self.betas)
        U = rate * mean / c1 / ((square / c2).sqrt() + self.eps)
        for row, u in zip(self.others, U.split([row.param.numel() for row in self.others])):
            if is_matrix(row.param):
                row.param.mul_(decay)
            row.param.sub_(u.view_as(row.param))


def schedule(step, steps):
    """Share of the peak learning rate at step 1 ... steps: 1% warm-up, then a cosine to FLOOR."""
    warm = max(1, steps // 100)
    if step <= warm:
        return step / warm
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2

# ---- One step, as a function or as a CUDA graph --------------------------------------------------


def make_step(model, balancer, optimizer, ids, labels):
    """A function that trains on whatever the tensors ids and labels hold when it is called.

    It returns one vector on the device: [losses, gradient norm, imbalance of each MoE layer].
    """
    def step():
        optimizer.zero_grad()
        balancer.start()
        loss, parts = model.loss(ids, labels)
        loss.backward()
        balancer.finish()
        numbers = torch.stack([*parts.values(), optimizer.step()])
        return torch.cat([numbers, balancer.imbalance()]) if balancer.layers else numbers
    return step


def capture(step, state, warm_up=3):
    """`step` as one CUDA graph: the same numbers from one launch.

    state  every tensor that a step changes, so that the warm-up can be undone
    """
    saved = [t.clone() for t in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):         # libraries set themselves up here, which a capture forbids
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = step()
    for t, old in zip(state, saved):
        t.copy_(old)
    return lambda: (graph.replay(), numbers)[1]

# ---- Log and saved state -------------------------------------------------------------------------


def write_whole(path, data):
    """The file is the old one or the new one at every moment, never a part."""
    temp = path.with_name(path.name + ".tmp")
    with open(temp, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temp, path)


def save_state(path, **state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, buffer.getbuffer())


def load_state(path, run):
    """What save_state wrote, read without running code from the file. Refused if `run` differs."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = json.loads(state["run"])
    except (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        raise ValueError(f"--resume: {path} is damaged, or no training state") from None
    for key in run:
        if saved.get(key) != run[key]:
            raise ValueError(f"--resume: {path} has {key} {saved.get(key)}, this run {run[key]}")
    return state


def read_log(folder):
    """The rows of folder/metrics.jsonl, header first; the last line of a killed run may be torn."""
    with open(Path(folder) / "metrics.jsonl") as f:
        rows = [json.loads(line) for line in f if line.endswith("\n")]
    if not rows or "header" not in rows[0]:
        raise ValueError(f"{folder}/metrics.jsonl has no header: not a log of train_tiny.py")
    return rows


def circumstances(device):
    """What a figure's caption says beside the run's settings."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return dict(command=" ".join(["python train_tiny.py", *sys.argv[1:]]), commit=commit,
                hardware=torch.cuda.get_device_name() if device == "cuda" else cpu,
                python=platform.python_version(), torch=torch.__version__)

# ---- Diagnostics ---------------------------------------------------------------------------------


@torch.no_grad()
def update_rms(rows, before, lr):
    """RMS of one step's change of every head's block, in units of lr: name -> [blocks x heads]."""
    rms = lambda change, row: [b.square().mean((1, 2)).sqrt() for b in blocks(change, row)]
    return {row.name: torch.cat(rms((row.param - old) / lr, row)).tolist()
            for row, old in zip(rows, before)}


@torch.no_grad()
def attn_res_weights(model, ids):
    """Weights of every AttnRes mix, averaged over ids: mix -> [stored blocks..., running sum]."""
    record, text, found, stored = {}, model.language_model.model, {}, []
    model.eval()(ids, record=record)
    model.train()

    def mix(name, running, proj, norm):
        sources = f32(torch.stack([*stored, running], -2))
        scores = attn_res_scores(sources, proj.weight[0], norm.weight, norm.eps)
        found[name] = scores.softmax(-1).mean((0, 1)).tolist()
    running = record["embed"]
    for i, layer in enumerate(text.layers):
        if stored:
            mix(f"{i} attention", running, layer.self_attention_res_proj,
                layer.self_attention_res_norm)
        stored += [running] * layer.starts_block
        running = record[f"layers.{i}.prefix_sum"]
        after_attention = running - record[f"layers.{i}.ffn_out"]
        mix(f"{i} feed-forward", after_attention, layer.mlp_res_proj, layer.mlp_res_norm)
    mix("final", running, text.output_attn_res_proj, text.output_attn_res_norm)
    return found

# ---- Figures, drawn from metrics.jsonl -----------------------------------------------------------


def plot(folder):
    """Draws every figure that the log has numbers for; returns their paths."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows, paths = read_log(folder), []
    header = rows[0]["header"]
    for draw, key, title, xlabel, ylabel in (
            (draw_loss, "loss", "Loss", "step", "bits per byte"),
            (draw_imbalance, "imbalance", "Load of the MoE layers", "step", "largest load / mean"),
            (draw_heads, "update_rms", "Update of a head's block", "step", "RMS / learning rate"),
            (draw_sources, "attn_res", "AttnRes after training", "source", "mix before")):
        data = [row for row in rows if row.get(key)]
        if data:
            fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
            draw(ax, [row["step"] for row in data], [row[key] for row in data], header, rows)
            ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
            fig.supxlabel("{command}\n{hardware}, seed {seed}, commit {commit}".format(**header),
                          fontsize=6)
            paths.append(Path(folder) / f"{key}.png")
            fig.savefig(paths[-1], dpi=150)
            plt.close(fig)
    return paths


def draw_loss(ax, steps, losses, header, rows):
    checks = [(row["step"], row["val_bpb"]) for row in rows if "val_bpb" in row]
    ax.plot(steps, np.array(losses) / math.log(2), lw=0.8, label="training")
    ax.plot(*zip(*checks), "o-", label="held out")
    ax.axhline(header["unigram_bits"], color="0.5", ls="--", label="entropy of single bytes")
    ax.set_ylim(bottom=0)
    ax.legend()


def draw_imbalance(ax, steps, loads, header, rows):
    for name, line in zip(header["moe"], zip(*loads)):
        ax.plot(steps, line, lw=0.8, label=name)
    ax.axhline(1, color="0.5", ls="--", label="balanced")
    ax.axhline(1.5, color="0.5", ls=":", label="1.5")
    ax.set_ylim(bottom=0.9)
    ax.legend(title=f"--balance {header['balance']}", fontsize=7, ncols=2)


def draw_heads(ax, steps, updates, header, rows):
    kinds = sorted({name.split(".")[-2] for name in updates[0]})
    for kind in kinds:
        lines = np.array([[x for name, heads in update.items() if name.split(".")[-2] == kind
                           for x in heads] for update in updates])
        ax.plot(steps, lines.mean(1), label=kind)
        ax.fill_between(steps, lines.min(1), lines.max(1), alpha=0.2)
    ax.axhline(ADAMW_SIZE, color="0.5", ls="--", label="AdamW's usual size")
    ax.set_ylim(bottom=0)
    ax.legend(title=f"--optimizer {header['optimizer']}; mean and range of heads", fontsize=7)


def draw_sources(ax, steps, mixes, header, rows):
    names, lines = zip(*mixes[-1].items())
    grid = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, weights in zip(grid, lines):
        row[:len(weights) - 1], row[-1] = weights[:-1], weights[-1]
    image = ax.imshow(grid, vmin=0, vmax=1, aspect="auto")
    ax.figure.colorbar(image, label="weight, mean over tokens")
    stored = ["embedding", *(f"block {i}" for i in range(1, grid.shape[1] - 1))]
    ax.set_xticks(range(grid.shape[1]), [*stored, "running sum"])
    ax.set_yticks(range(len(names)), names, fontsize=7)

# ---- The run -------------------------------------------------------------------------------------


def settings(args):
    """(config, run): the model, and everything a resumed run must have in common with the first."""
    run = dict(preset=args.preset, **PRESETS[args.preset], seed=args.seed, balance=args.balance,
               optimizer=args.optimizer)
    config = K3Config.tiny(**{**run.pop("model"), **dict(map(key_value, args.set))})
    run["steps"] = run["steps"] if args.steps is None else args.steps
    if run["steps"] < 1 or args.seed < 0:
        raise ValueError(f"--steps {run['steps']} --seed {args.seed}: from 1 and from 0 on")
    if config.vocab_size < 256:
        raise ValueError(f"--set vocab_size={config.vocab_size}: bytes need at least 256")
    if args.preset == "gpu" and not torch.cuda.is_available():
        raise ValueError("--preset gpu: there is no CUDA device; --preset cpu needs none")
    return config, {**run, "config": config.to_json()}


def key_value(pair):
    """--set's "KEY=VALUE" as (key, value); VALUE is JSON, or a bare word."""
    key, _, value = pair.partition("=")
    if key not in K3Config.__dataclass_fields__:
        raise ValueError(f"--set {pair}: {key} is not a key of the config")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def train(args):
    """One run, from data to checkpoint and figures."""
    (config, run), out, began = settings(args), Path(args.out), time.perf_counter()
    device = "cuda" if args.preset == "gpu" else "cpu"
    size, length, steps = run["batch"], run["length"], run["steps"]
    text, held = read_text(args.data)
    if len(text) <= size * length or len(held) <= length:
        raise ValueError(f"--data {args.data}: {len(text) + len(held)} bytes of text are too few, "
                         f"a batch takes {size} x {length} and a {HELD_OUT}th is held out")
    run["data"] = f"{len(text)} bytes, CRC {zlib.crc32(text):08x}"
    out.mkdir(parents=True, exist_ok=True)

    model = K3(config, seed=args.seed).to(device).train()
    model.kernel, model.compute_dtype = "fast", torch.bfloat16 if device == "cuda" else None
    balancer = Balancer(model, args.balance)
    table = param_table(model, args.optimizer)
    optimizer = PerHeadMuon(table, run["lr"], dtype=model.compute_dtype)
    heads = [row for row in param_table(model) if row.heads > 1 and ".self_attn." in row.name]
    moe = [name.removeprefix("language_model.model.").removesuffix(".block_sparse_moe")
           for name, module in model.named_modules() if module in balancer.layers]

    header = {**circumstances(device), **run, "unigram_bits": unigram_bits(text), "moe": moe}
    start, rows = 0, [{"header": header}]
    if args.resume:
        state = load_state(out / "state.pt", run)
        start = state["step"]
        rows = [row for row in read_log(out) if row.get("step", 0) <= start]
        model.load_state_dict(state["model"])
        for name, t in state["optimizer"].items():
            optimizer.state[name].copy_(t)
    write_whole(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    print(f"{sum(t.numel() for t in model.parameters()):,} parameters, {header['hardware']}; "
          f"{len(text):,} bytes to train on, entropy of a byte {header['unigram_bits']:.3f} bits")

    ids, labels = (torch.zeros(size, length, dtype=torch.long, device=device) for _ in range(2))
    run_step = make_step(model, balancer, optimizer, ids, labels)
    if device == "cuda" and not args.no_cuda_graph:
        run_step = capture(run_step, [*model.state_dict().values(), *optimizer.state.values()])
    names = ["loss", *["mtp_loss"] * config.num_nextn_predict_layers, "grad_norm"]
    numbers, clock = [], time.perf_counter()
    for step in range(start + 1, steps + 1):
        for static, new in zip((ids, labels), batch(text, args.seed, step, size, length)):
            static.copy_(new)
        lr = run["lr"] * schedule(step, steps)
        optimizer.lr.fill_(lr)
        look = step % run["log_every"] == 0 or step == steps
        before = [row.param.detach().clone() for row in heads] if look else None
        numbers.append(run_step().clone())
        if not look:
            continue

        numbers = torch.stack(numbers).tolist()                    # the only wait for the device
        speed = round(len(numbers) * size * length / (time.perf_counter() - clock))
        rows = [dict(step=step - len(numbers) + i, **dict(zip(names, line)), tokens_per_s=speed,
                     imbalance=line[len(names):]) for i, line in enumerate(numbers, 1)]
        rows[-1].update(lr=lr, update_rms=update_rms(heads, before, lr))
        left = (steps - step) * size * length // speed
        report = (f"step {step:4d}/{steps}  loss {numbers[-1][0]:.3f}  {speed:,} tokens/s  "
                  f"imbalance {max(rows[-1]['imbalance'], default=1):.2f}  "
                  f"left {left // 60}:{left % 60:02d}")
        if step % run["val_every"] == 0 or step == steps:
            rows.append({"step": step, "val_bpb": bits_per_byte(model, held, run)})
            report += f"  held out {rows[-1]['val_bpb']:.3f} bits per byte"
        if step == steps and config.attn_res_block_size:
            rows.append({"step": step, "attn_res": attn_res_weights(model, ids)})
        with open(out / "metrics.jsonl", "a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
        if step % run["save_every"] == 0 or step == steps:
            save_state(out / "state.pt", run=json.dumps(run), step=step, model=model.state_dict(),
                       optimizer=optimizer.state)
        print(report, flush=True)
        numbers, clock = [], time.perf_counter()

    middle = len(held) // 2
    prompt = bytes(held[middle:middle + 64]).decode(errors="ignore").strip()
    finish(model.eval(), out, prompt or "def", run)
    print(f"{time.perf_counter() - began:.0f} s in all")


def finish(model, out, prompt, run):
    """Checkpoint, sample, figures, and the numbers that sum the run up."""
    folder = out / "checkpoint"
    save_checkpoint(model, folder, experts="bf16")    # not trained for MXFP4's rounding
    save_byte_tokenizer(folder)
    sample = "".join(generate(model, load_tokenizer(folder), prompt, run["sample"], temperature=0.8,
                              seed=run["seed"]))
    print(f"---- held-out text, | and a sample that continues it ----\n{prompt}|{sample}\n----")
    print("figures", *plot(out), "\ncheckpoint", folder)
    rows = read_log(out)
    worst = [max(row["imbalance"]) for row in rows if row.get("imbalance")]
    settled = max((i for i, x in enumerate(worst, 1) if x >= 1.5), default=0)
    if settled < len(worst):
        print(f"every MoE layer's imbalance is below 1.5 from step {settled + 1} on, "
              f"{max(worst[settled:]):.2f} at most")
    bits = [row["val_bpb"] for row in rows if "val_bpb" in row][-1]
    print(f"validation {bits:.3f} bits per byte; entropy of single bytes "
          f"{rows[0]['header']['unigram_bits']:.3f}")


def main(argv=None):
    ap = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = ap.add_argument
    add("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, metavar="N", help="optimizer steps (default: the preset's)")
    add("--data", metavar="PATH", help="UTF-8 file or folder (default: Python's standard library)")
    add("--out", default="out", metavar="DIR", help="for log, figures, checkpoint (default: out)")
    add("--seed", type=int, default=0, help="of weights, batches and the sample")
    add("--resume", action="store_true", help="continue from DIR/state.pt")
    add("--balance", choices=("qb", "qb-exact", "sign", "none"), default="qb")
    add("--optimizer", choices=("per-head-muon", "muon", "adamw"), default="per-head-muon")
    add("--no-cuda-graph", action="store_true", help="launch every kernel by itself")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="config key; repeatable")
    add("--plot", metavar="DIR", help="only draw the figures of DIR/metrics.jsonl again")
    args = ap.parse_args(argv)
    try:
        print(*plot(args.plot)) if args.plot else train(args)
    except (ValueError, OSError) as error:
        print(f"train_tiny.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
