"""Experts, latent and linear attention against torch modules on the meta device, which are written here anew."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from simpar.model.attention import LatentAttention, LinearAttention
from simpar.model.experts import MoE
from simpar.model.transformer import Transformer

BATCH, SEQ, HIDDEN, VOCAB = 2, 32, 48, 100


class Mlp(nn.Module):
    def __init__(self, width, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, width, bias=bias), nn.Linear(HIDDEN, width, bias=bias)
        self.down = nn.Linear(width, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Every expert gets the same number of rows, since the meta device cannot choose."""

    def __init__(self, experts, top_k, width, *, shared=0, gate=False, bias=False):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(HIDDEN, experts, bias=bias)
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, width, HIDDEN))
        if bias:
            self.up_bias = nn.Parameter(torch.empty(experts, 1, 2 * width))
            self.down_bias = nn.Parameter(torch.empty(experts, 1, HIDDEN))
        self.bias = bias
        self.shared = Mlp(shared) if shared else None
        self.shared_gate = nn.Linear(HIDDEN, 1, bias=False) if gate else None

    def forward(self, x):
        scores = self.router(x).topk(self.top_k).values.softmax(-1)
        rows = (x.unsqueeze(-2) * scores.unsqueeze(-1)).reshape(self.up.shape[0], -1, HIDDEN)
        inner = torch.bmm(rows, self.up)
        gate, up = (inner + self.up_bias if self.bias else inner).chunk(2, dim=-1)
        outer = torch.bmm(functional.silu(gate) * up, self.down)
        outer = outer + self.down_bias if self.bias else outer
        mixed = outer.reshape(*x.shape[:-1], self.top_k, HIDDEN).sum(-2)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        return mixed + (self.shared_gate(x).sigmoid() * shared if self.shared_gate is not None else shared)


class Attention(nn.Module):
    def __init__(self, heads, kv_heads, dim, *, gate=False, sinks=False, norm="head"):
        super().__init__()
        self.dims, self.gate = (heads, kv_heads, dim), gate
        self.q = nn.Linear(HIDDEN, heads * dim * (1 + gate), bias=False)
        self.k, self.v = nn.Linear(HIDDEN, kv_heads * dim, bias=False), nn.Linear(HIDDEN, kv_heads * dim, bias=False)
        self.out = nn.Linear(heads * dim, HIDDEN, bias=False)
        widths = {"head": (dim, dim), "width": (heads * dim, kv_heads * dim), "none": ()}[norm]
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in widths)
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None

    def forward(self, x):
        heads, kv_heads, dim = self.dims
        q, k, v = self.q(x), self.k(x), self.v(x)
        gate, q = q.chunk(2, dim=-1) if self.gate else (None, q)
        q, k, v = (
            t.unflatten(-1, (count, dim)).transpose(1, 2) for t, count in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(-2)
        return self.out(mixed if gate is None else mixed * gate.sigmoid())


class Latent(nn.Module):
    def __init__(self, heads, q_rank, *sizes):
        super().__init__()
        kv_rank, nope, rope, value = sizes
        self.sizes = (heads, *sizes)
        out = heads * (nope + rope)
        if q_rank:
            down, up = nn.Linear(HIDDEN, q_rank, bias=False), nn.Linear(q_rank, out, bias=False)
            self.q = nn.Sequential(down, nn.RMSNorm(q_rank), up)
        else:
            self.q = nn.Linear(HIDDEN, out, bias=False)
        self.kv_down = nn.Linear(HIDDEN, kv_rank + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.kv_up = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.out = nn.Linear(heads * value, HIDDEN, bias=False)

    def forward(self, x):
        heads, kv_rank, nope, rope, value = self.sizes
        q = self.q(x).unflatten(-1, (heads, nope + rope)).transpose(1, 2)
        latent, turned = self.kv_down(x).split((kv_rank, rope), dim=-1)
        expanded = self.kv_up(self.kv_norm(latent)).unflatten(-1, (heads, nope + value)).transpose(1, 2)
        k, v = expanded.split((nope, value), dim=-1)
        k = torch.cat((k, turned.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class GatedDelta(nn.Module):
    """Gated DeltaNet in chunks, after the reference code of its paper; the solve's own steps are not products."""

    def __init__(self, *sizes):
        super().__init__()
        key_heads, value_heads, dim, value_dim, conv, _ = self.sizes = sizes
        keys, values = key_heads * dim, value_heads * value_dim
        self.qkv = nn.Linear(HIDDEN, 2 * keys + values, bias=False)
        self.gates = nn.Linear(HIDDEN, values + 2 * value_heads, bias=False)
        self.conv = nn.Conv1d(2 * keys + values, 2 * keys + values, conv, groups=2 * keys + values, bias=False)
        self.decay, self.step = (nn.Parameter(torch.empty(value_heads)) for _ in range(2))
        self.norm = nn.RMSNorm(value_dim)
        self.out = nn.Linear(values, HIDDEN, bias=False)

    def forward(self, x):
        key_heads, value_heads, dim, value_dim, conv, chunk = self.sizes
        keys, values = key_heads * dim, value_heads * value_dim
        mixed = self.conv(functional.pad(self.qkv(x).transpose(1, 2), (conv - 1, 0))).transpose(1, 2)
        gate, beta, step = self.gates(x).split((values, value_heads, value_heads), dim=-1)
        decay = (self.decay * functional.softplus(step + self.step)).transpose(1, 2).unsqueeze(-1)
        q, k, v = (
            t.unflatten(-1, (count, -1)).repeat_interleave(value_heads // count, dim=2).transpose(1, 2)
            for t, count in zip(
                mixed.split((keys, keys, values), dim=-1), (key_heads, key_heads, value_heads), strict=True
            )
        )
        kb, vb = (t * beta.transpose(1, 2).unsqueeze(-1).sigmoid() for t in (k, v))
        state, found = x.new_zeros(x.shape[0], value_heads, dim, value_dim), []
        for start in range(0, x.shape[1], chunk):
            q_, k_, kb_, vb_, g = (t[:, :, start : start + chunk] for t in (q, k, kb, vb, decay.exp()))
            lower = torch.tril(kb_ @ k_.mT, -1) + torch.eye(chunk, device=x.device)
            inverse = torch.linalg.solve_triangular(lower, torch.eye(chunk, device=x.device), upper=False)
            new = inverse @ vb_ - (inverse @ (kb_ * g)) @ state
            found.append((q_ * g) @ state + torch.tril(q_ @ k_.mT) @ new)
            state = state * g[:, :, -1:] + k_.mT @ new
        mixed = self.norm(torch.cat(found, dim=2)).transpose(1, 2).flatten(-2)
        return self.out(mixed * functional.silu(gate))


class Lightning(nn.Module):
    def __init__(self, heads, dim, chunk):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.gate = (nn.Linear(HIDDEN, n * heads * dim, bias=False) for n in (3, 1))
        self.norm, self.out = nn.RMSNorm(heads * dim), nn.Linear(heads * dim, HIDDEN, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        state, found = x.new_zeros(x.shape[0], self.heads, q.shape[-1], q.shape[-1]), []
        for start in range(0, x.shape[1], self.chunk):
            q_, k_, v_ = (t[:, :, start : start + self.chunk] for t in (q, k, v))
            found.append(torch.tril(q_ @ k_.mT) @ v_ + q_ @ state)
            state = state + k_.mT @ v_
        mixed = self.norm(torch.cat(found, dim=2).transpose(1, 2).flatten(-2))
        return self.out(mixed * self.gate(x).sigmoid())


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, *blocks, head_bias=False):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCAB, HIDDEN), nn.Sequential(*blocks)
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=head_bias)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def described(layers, **fields):
    fixed = {"name": "m", "hidden": HIDDEN, "vocab": VOCAB, "gated_mlp": True, "tied_embeddings": False}
    return Transformer.model_validate({**fixed, "layers": layers, "heads": 4, "kv_heads": 2, "head_dim": 16, **fields})


def plain():
    return Attention(4, 2, 16, norm="none")


def mixtral():
    model = described(2, moe=MoE(experts=8, top_k=2, ffn_hidden=40))
    return model, Model(*(Block(plain(), Experts(8, 2, 40)) for _ in range(2)))


def qwen_moe():
    moe = MoE(experts=16, top_k=4, ffn_hidden=24, shared_ffn_hidden=56, shared_gate=True, first_dense=1, pattern="ED")
    model = described(4, moe=moe, ffn_hidden=72, qk_norm=True)
    mlps = (Mlp(72), Experts(16, 4, 24, shared=56, gate=True), Mlp(72), Experts(16, 4, 24, shared=56, gate=True))
    return model, Model(*(Block(Attention(4, 2, 16), mlp) for mlp in mlps))


def gpt_oss():
    moe = MoE(experts=8, top_k=4, ffn_hidden=24, router_bias=True)
    model = described(2, moe=moe, mlp_bias=True, attention_sinks=True, head_bias=True)
    blocks = (Block(Attention(4, 2, 16, sinks=True, norm="none"), Experts(8, 4, 24, bias=True)) for _ in range(2))
    return model, Model(*blocks, head_bias=True)


def olmoe():
    model = described(2, moe=MoE(experts=8, top_k=8, ffn_hidden=24), qk_norm=True, qk_norm_weights="width")
    return model, Model(*(Block(Attention(4, 2, 16, norm="width"), Experts(8, 8, 24)) for _ in range(2)))


def deepseek(q_rank):
    mla = LatentAttention(q_rank=q_rank, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12)
    moe = MoE(experts=8, top_k=2, ffn_hidden=24, shared_ffn_hidden=48, first_dense=1)
    model = described(3, ffn_hidden=88, mla=mla, moe=moe, kv_heads=None, head_dim=None)
    mlps = (Mlp(88), Experts(8, 2, 24, shared=48), Experts(8, 2, 24, shared=48))
    return model, Model(*(Block(Latent(4, q_rank, 20, 16, 8, 12), mlp) for mlp in mlps))


def qwen_next():
    sizes = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12, "conv_width": 4, "chunk": 16}
    linear = LinearAttention(rule="gated_delta", pattern="LLF", **sizes)
    model = described(3, ffn_hidden=88, linear=linear, attention_gate=True, qk_norm=True)
    attentions = (GatedDelta(*sizes.values()), GatedDelta(*sizes.values()), Attention(4, 2, 16, gate=True))
    return model, Model(*(Block(attention, Mlp(88)) for attention in attentions))


def minimax():
    sizes = {"key_heads": 4, "value_heads": 4, "key_dim": 16, "value_dim": 16, "chunk": 16}
    model = described(2, ffn_hidden=88, linear=LinearAttention(rule="lightning", pattern="LF", **sizes))
    return model, Model(Block(Lightning(4, 16, 16), Mlp(88)), Block(plain(), Mlp(88)))


MODELS = {
    "mixtral": mixtral,
    "qwen-moe": qwen_moe,
    "gpt-oss": gpt_oss,
    "olmoe": olmoe,
    "deepseek-v3": lambda: deepseek(28),
    "deepseek-v2-lite": lambda: deepseek(None),
    "qwen3-next": qwen_next,
    "minimax": minimax,
}


@pytest.fixture(params=MODELS)
def pair(request):
    with torch.device("meta"):
        return MODELS[request.param]()


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_parameters_equal_the_modules(pair):
    model, module = pair
    assert model.parameters == count(module)
    for layer, block in enumerate(module.blocks):
        assert model.layer_parameters(model.layer_kind(layer)) == count(block)


def test_active_parameters_are_those_without_the_experts_not_chosen(pair):
    model, module = pair
    idle = 0
    for block in module.blocks:
        if isinstance(block.mlp, Experts):
            stacked = sum(p.numel() for name, p in block.mlp.named_parameters() if name.startswith(("up", "down")))
            experts = block.mlp.up.shape[0]
            idle += stacked * (experts - block.mlp.top_k) // experts
    assert model.active_parameters == count(module) - idle


def test_forward_flop_equal_torchs_counter(pair):
    model, module = pair
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counted:
        module(ids)
    assert model.flop_per_token(SEQ, "full").total * BATCH * SEQ == counted.get_total_flops()


# where attention is linear, the first chunk's state needs no gradient, which the closed form does not take off
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"qwen3-next", "minimax"}))
def test_training_flop_equal_torchs_counter(name):
    with torch.device("meta"):
        model, module = MODELS[name]()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counted:
        module(ids).sum().backward()
    assert model.step_flop(BATCH * SEQ, SEQ, "full").total == counted.get_total_flops()
