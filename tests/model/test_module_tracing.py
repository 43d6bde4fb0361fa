import pickle
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from simpar.errors import ModelError
from simpar.model.module import Affine, ModuleModel, fit_affine, mlp, trace_module
from simpar.model.work import Attention, Gemm, MemoryBound


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def perceptron():
    return nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 6, 2, stride=2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, 10),
    )


def encoder(**changes):
    return nn.TransformerEncoderLayer(16, 4, 32, **{"batch_first": True, **changes})


LABELS = torch.zeros(6, dtype=torch.long)
JOBS = {
    "perceptron": lambda: (perceptron(), torch.zeros(6, 784), nn.MSELoss(), torch.zeros(6, 10)),
    "two linears": lambda: (TwoLinears(), torch.zeros(6, 10), nn.MSELoss(), torch.zeros(6, 10)),
    "cnn": lambda: (cnn(), torch.zeros(6, 3, 16, 16), functional.cross_entropy, LABELS),
    "encoder": lambda: (encoder(), torch.zeros(6, 5, 16), nn.MSELoss(), torch.zeros(6, 5, 16)),
    "lstm": lambda: (
        nn.Sequential(nn.Embedding(9, 8), Last(nn.LSTM(8, 12, batch_first=True))),
        LABELS[:, None],
        None,
        None,
    ),
}


class Last(nn.Module):
    """A recurrent network's output without its state."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)[0]


@pytest.fixture(params=JOBS)
def job(request):
    return JOBS[request.param]()


def counted_flop(module, inputs, loss, target):
    """Forward and backward FLOP of a run on the meta device, where torch takes attention apart into products."""
    module, inputs = module.to("meta"), inputs.to("meta")
    with FlopCounterMode(display=False) as forward:
        out = module(inputs)
        value = out.sum() if loss is None else loss(out, target.to("meta"))
    with FlopCounterMode(display=False) as backward:
        value.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def flop(kernels):
    """FLOP of kernels, the backward pass of attention counted without FlashAttention's recomputation (2 for 2.5)."""
    shares = (0.8 if isinstance(kernel, Attention) and kernel.backward else 1.0 for kernel in kernels)
    return sum(share * kernel.work.flop for share, kernel in zip(shares, kernels, strict=True))


def test_flop_and_parameters_equal_torchs(job):
    module, inputs, loss, target = job
    model = trace_module(module, inputs, loss=loss, target=target)
    forward = flop([kernel for layer in model.layers for kernel in layer.forward(6)])
    backward = flop([kernel for layer in model.layers for kernel in layer.backward(6)])
    assert (forward, backward) == counted_flop(module, inputs, loss, target)
    assert model.parameters == model.trainable_parameters == sum(p.numel() for p in module.parameters())


def test_a_trace_at_another_batch_gives_the_same_model(job):
    module, inputs, loss, target = job
    small = trace_module(module, inputs, loss=loss, target=target)
    wide = (torch.cat([tensor] * 3) if tensor is not None else None for tensor in (inputs, target))
    inputs, target = wide
    assert trace_module(module, inputs, loss=loss, target=target) == small


def test_the_perceptron_of_the_tutorial_kernel_by_kernel():
    model = trace_module(perceptron(), torch.zeros(64, 784), loss=nn.MSELoss(), target=torch.zeros(64, 10))
    first, second = model.layers
    assert first.forward(64) == (
        Gemm(64, 500, 784, "fp32", out_bytes=4),
        MemoryBound(2 * 64 * 500 * 4),
    )
    assert first.backward(64) == (
        MemoryBound(3 * 64 * 500 * 4),  # gradient and output of the ReLU in, gradient out
        Gemm(500, 784, 64, "fp32", out_bytes=4),  # weights; the input needs no gradient
        MemoryBound(64 * 500 * 4 + 500 * 4),  # bias
    )
    assert second.forward(64) == (Gemm(64, 10, 500, "fp32", out_bytes=4), MemoryBound(2 * 64 * 10 * 4 + 4))
    assert second.backward(64) == (
        MemoryBound(3 * 64 * 10 * 4 + 4),
        Gemm(64, 500, 10, "fp32", out_bytes=4),
        Gemm(10, 500, 64, "fp32", out_bytes=4),
        MemoryBound(64 * 10 * 4 + 10 * 4),
    )
    assert [layer.activation_bytes(64) for layer in model.layers] == [64 * (784 + 500) * 4, 64 * (10 + 10) * 4]
    assert [layer.output_bytes(64) for layer in model.layers] == [64 * 500 * 4, 64 * 10 * 4]
    assert [layer.parameters for layer in model.layers] == [392_500, 5_010]
    assert (model.name, model.dtype, model.parameters) == ("Sequential", "fp32", 397_510)


ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", None])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", ["5-7", "784-500-10", "9-4-5-7"])
def test_a_described_perceptron_equals_the_traced_one(sizes, activation, loss, dtype):
    widths = [int(width) for width in sizes.split("-")]
    parts = []
    for inner, outer in pairwise(widths):
        parts += [nn.Linear(inner, outer), ACTIVATIONS[activation]()]
    module = nn.Sequential(*parts[:-1]).to(DTYPES[dtype])
    labels = {"mse": torch.zeros(4, widths[-1], dtype=DTYPES[dtype]), "cross_entropy": LABELS[:4], None: None}
    call = {"mse": functional.mse_loss, "cross_entropy": functional.cross_entropy, None: None}
    inputs = torch.zeros(4, widths[0], dtype=DTYPES[dtype])
    traced = trace_module(module, inputs, loss=call[loss], target=labels[loss], name=f"mlp:{sizes}")
    assert mlp(sizes, activation=activation, loss=loss, dtype=dtype) == traced


def test_layers_are_children_with_parameters_and_containers_open_once():
    nested = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4))))
    model = trace_module(nested, torch.zeros(4, 2, 2))
    assert [layer.name for layer in model.layers] == ["1.0", "1.2"]
    assert [layer.name for layer in trace_module(encoder(), torch.zeros(4, 5, 16)).layers] == [
        "self_attn",
        "norm1",
        "linear1",
        "linear2",
        "norm2",
    ]
    assert [layer.name for layer in trace_module(nn.Linear(3, 3), torch.zeros(4, 3)).layers] == ["Linear"]


class Blocks(nn.Module):
    """Equal residual blocks between an embedding and a head tied to it, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 50, bias=False)  # registered first, but runs last
        self.tokens = nn.Embedding(50, 16)
        self.head.weight = self.tokens.weight
        self.position = nn.Parameter(torch.zeros(8, 16))
        self.blocks = nn.ModuleList(encoder(dropout=0.0) for _ in range(3))
        self.unused = nn.Linear(2, 2)

    def forward(self, ids):
        x = self.tokens(ids) + self.position
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_backward_work_goes_back_to_the_layer_that_made_it():
    model = trace_module(Blocks(), torch.zeros(4, 8, dtype=torch.long))
    names = ["tokens", "blocks.0", "blocks.1", "blocks.2", "head", "unused"]
    assert [layer.name for layer in model.layers] == names
    tokens, *blocks, head, unused = model.layers
    assert all(block.forward_forms == blocks[0].forward_forms for block in blocks)
    assert all(block.backward_forms == blocks[0].backward_forms for block in blocks)
    assert all(block.activation_bytes(4) == blocks[1].activation_bytes(4) for block in blocks[1:])
    assert sum(isinstance(kernel, Attention) for kernel in blocks[0].backward(4)) == 1
    assert flop(blocks[0].backward(4)) == 2 * flop(blocks[0].forward(4))
    assert flop(tokens.backward(4)) == 0
    assert flop(head.backward(4)) == 2 * flop(head.forward(4)) == 2 * 2 * 4 * 8 * 16 * 50
    assert (tokens.parameters, head.parameters, unused.parameters) == (50 * 16 + 8 * 16, 0, 6)
    assert unused.forward(4) == unused.backward(4) == ()
    assert [layer.output_bytes(4) for layer in model.layers[:4]] == [4 * 8 * 16 * 4] * 4


class Double(torch.autograd.Function):
    """Twice its argument, as a user's own autograd function."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Between(nn.Module):
    """Functional work after the first layer: one part used at once, one only after the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        late = y.tanh()
        return self.second(Double.apply(y)) + late


def test_functional_work_belongs_to_the_layer_that_ran_last_in_both_directions():
    first, second = trace_module(Between(), torch.zeros(4, 8)).layers
    size = 4 * 8 * 4
    tanh, tanh_back = MemoryBound(2 * size, "activation"), MemoryBound(3 * size, "activation")
    double = MemoryBound(2 * size)
    assert first.forward(4) == (Gemm(4, 8, 8, "fp32", out_bytes=4), tanh, double)
    assert second.forward(4) == (Gemm(4, 8, 8, "fp32", out_bytes=4), MemoryBound(3 * size))
    assert first.backward(4).count(tanh_back) == first.backward(4).count(double) == 1
    assert tanh_back not in second.backward(4)
    assert double not in second.backward(4)


def test_a_kept_view_keeps_its_whole_storage():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.scale = nn.Linear(8, 6), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.project(x)[:, :3] * self.scale

    (layer,) = trace_module(Half(), torch.zeros(4, 8)).layers
    assert layer.activation_bytes(4) == 4 * 8 * 4 + 4 * 6 * 4


def test_attention_is_one_kernel_each_way_and_keeps_what_flash_attention_keeps():
    class Core(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

        def forward(self, q, k, v):
            return functional.scaled_dot_product_attention(
                q * self.scale, k * self.scale, v * self.scale, is_causal=True, enable_gqa=True
            )

    q, kv = torch.zeros(4, 8, 32, 16, dtype=torch.bfloat16), torch.zeros(4, 2, 32, 16, dtype=torch.bfloat16)
    (layer,) = trace_module(Core(), (q, kv, kv.clone())).layers
    expected = Attention(4, 32, 32, heads=8, kv_heads=2, head_dim=16, causal=True, dtype="bf16")
    assert [kernel for kernel in layer.forward(4) if isinstance(kernel, Attention)] == [expected]
    assert [kernel.backward for kernel in layer.backward(4) if isinstance(kernel, Attention)] == [True]
    queries, keys = q.nbytes, kv.nbytes
    kept_by_attention = queries + 2 * keys + queries + 4 * 8 * 32 * 4  # q, k, v, output, one fp32 sum per query
    kept_by_products = queries + 2 * keys  # the unscaled inputs, for the gradient of the scale
    assert layer.activation_bytes(4) == kept_by_attention + kept_by_products


def test_dropout_and_rmsnorm_are_single_kernels():
    norm = nn.RMSNorm(64)
    (layer,) = trace_module(nn.Sequential(norm, nn.Dropout(0.1)), torch.zeros(4, 64)).layers
    size = 4 * 64 * 4
    assert layer.forward(4) == (
        MemoryBound(2 * size + 64 * 4 + 4 * 4, "norm"),
        MemoryBound(2 * size + 4 * 64),  # in, out, and a mask of one byte an element
    )
    evaluated = trace_module(nn.Sequential(norm, nn.Dropout(0.1)).eval(), torch.zeros(4, 64))
    assert len(evaluated.layers[0].forward(4)) == 1


def test_views_are_free_and_broadcasts_are_read_once():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x.transpose(0, 1).view(2, 4, -1).permute(2, 0, 1) * self.scale.expand(x.shape).view(-1, 2, 4)

    (layer,) = trace_module(Scaled(), torch.zeros(4, 8)).layers
    assert layer.forward(4) == (MemoryBound(2 * 4 * 8 * 4 + 8 * 4),)


def test_an_embedding_reads_rows_and_not_the_table():
    (layer,) = trace_module(nn.Embedding(10_000, 16), torch.zeros(4, dtype=torch.long)).layers
    assert layer.forward(4) == (MemoryBound(2 * 4 * 16 * 4 + 4 * 8),)
    assert layer.backward(4) == (MemoryBound(10_000 * 16 * 4 + 4 * 16 * 4 + 4 * 8),)


def test_grouped_convolutions_are_batched_products():
    (layer,) = trace_module(nn.Conv2d(8, 16, 3, padding=1, groups=4, bias=False), torch.zeros(4, 8, 6, 6)).layers
    assert layer.forward(4) == (Gemm(4 * 36, 4, 2 * 9, "fp32", 4, 4),)
    assert layer.backward(4) == (Gemm(4, 2 * 9, 4 * 36, "fp32", 4, 4),)


def test_frozen_parameters_get_no_gradient():
    module = perceptron()
    module[0].requires_grad_(False)
    first, second = trace_module(module, torch.zeros(4, 784)).layers
    assert (first.parameters, first.trainable_parameters) == (392_500, 0)
    assert first.backward(4) == ()
    assert [type(kernel) for kernel in second.backward(4)] == [Gemm, MemoryBound]


def test_inputs_may_be_a_dict_and_outputs_too():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(6, 3)

        def forward(self, left, right):
            return {"out": self.project(torch.cat([left, right], dim=1))}

    model = trace_module(
        Named(), {"left": torch.zeros(4, 2), "right": torch.zeros(4, 4)}, loss=lambda out: out["out"].sum()
    )
    assert Gemm(7, 3, 6, "fp32", out_bytes=4) in model.layers[0].forward(7)
    assert model.layers[0].output_bytes(7) == 7 * 3 * 4


def test_the_users_module_stays_as_it_is():
    module = perceptron()
    before = [p.detach().clone() for p in module.parameters()]
    trace_module(module, torch.zeros(4, 784))
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert all(p.device.type == "cpu" and p.grad is None for p in module.parameters())
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert module.training


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_own_operators_are_back_after_a_trace(fails):
    q = torch.zeros(2, 4, 8, 16, device="meta")

    def meta_flop():
        with FlopCounterMode(display=False) as counter:
            functional.scaled_dot_product_attention(q, q, q)
        return counter.get_total_flops()

    before = meta_flop()
    if fails:
        with pytest.raises(ModelError) as caught:
            trace_module(ValueDependent(), torch.zeros(4, 3))
        assert caught.tb is not None  # the failed trace's frames are still alive here
    else:
        trace_module(encoder(), torch.zeros(4, 5, 16))
    assert meta_flop() == before > 0


def test_a_target_without_a_loss_is_a_mistake():
    with pytest.raises(ModelError, match="has a target but no loss; give the loss that compares with it"):
        trace_module(perceptron(), torch.zeros(4, 784), target=torch.zeros(4, 10))


def test_a_model_is_a_plain_value():
    model = trace_module(perceptron(), torch.zeros(4, 784))
    assert len({model, trace_module(perceptron(), torch.zeros(4, 784))}) == 1
    assert pickle.loads(pickle.dumps(model)) == model
    assert model.step_flop(64) == 2 * 64 * (2 * 784 * 500 + 3 * 500 * 10)


class ValueDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(3, 3)

    def forward(self, x):
        return self.project(x) if x.sum() > 0 else x


class FixedBatch(ValueDependent):
    def forward(self, x):
        return self.project(x.view(64, 3))


class Branches(ValueDependent):
    def forward(self, x):
        return self.project(x) if x.shape[0] > 2 else self.project(x).relu()


class Pairs(ValueDependent):
    def forward(self, x):
        y = self.project(x)
        return y @ y.T


@pytest.mark.parametrize(
    ("module", "inputs", "text"),
    [
        (ValueDependent(), torch.zeros(4, 3), "RuntimeError: Tensor.item() cannot be called on meta tensors"),
        (
            FixedBatch(),
            torch.zeros(64, 3),
            "cannot be traced at batch 2 on the meta device (RuntimeError: shape '[64, 3]'",
        ),
        (Branches(), torch.zeros(4, 3), "layer project, forward runs other kernels at other batch sizes (2, 3, 4)"),
        (Pairs(), torch.zeros(4, 3), "Gemm does 24, 54, 96 FLOP at batch 2, 3, 4, which is not affine in the batch"),
        (encoder(batch_first=False), torch.zeros(4, 5, 16), "batch_first=True"),
        (
            nn.Linear(3, 3).double(),
            torch.zeros(4, 3).double(),
            "products in float64 cannot be priced; convert the module",
        ),
        (nn.ReLU(), torch.zeros(4, 3), "ReLU has nothing to train"),
        (nn.Linear(3, 3), torch.zeros(()), "no sample input with a batch dimension"),
        (nn.Linear(3, 3), torch.zeros(4, 5), "RuntimeError: a and b must have same reduction dim"),
    ],
)
def test_what_cannot_be_traced_says_why(module, inputs, text):
    with pytest.raises(ModelError) as caught:
        trace_module(module, inputs)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "changes", "text"),
    [
        ("784", {}, "mlp: '784' is not a chain of layer widths"),
        ("784-0-10", {}, "write at least two positive whole numbers joined by '-'"),
        ("784-x", {}, "mlp: '784-x' is not a chain"),
        (
            "4-4",
            {"activation": "rellu"},
            "mlp: activation 'rellu' is unknown; did you mean 'relu'?; choose one of relu, gelu",
        ),
        ("4-4", {"loss": "msee"}, "mlp: loss 'msee' is unknown; did you mean 'mse'?"),
        ("4-4", {"dtype": "fp64"}, "mlp: dtype 'fp64' is unknown"),
    ],
)
def test_a_perceptron_that_cannot_be_read_says_why(sizes, changes, text):
    with pytest.raises(ModelError) as caught:
        mlp(sizes, **changes)
    assert text in str(caught.value)


def test_perceptrons_need_no_torch():
    script = """
import sys
sys.modules["torch"] = None
from simpar.errors import ModelError
from simpar.model.module import mlp, trace_module
print(mlp("784-500-10").parameters)
try:
    trace_module(None, None)
except ModelError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    parameters, message = run.stdout.splitlines()
    assert parameters == "397510"
    assert message.startswith("tracing a torch module needs torch, which cannot be imported")


def test_affine_fits_need_whole_numbers_on_one_line():
    assert fit_affine([7, 10, 22], (2, 3, 7)) == Affine(1, 3)
    assert fit_affine([4, 9, 49], (2, 3, 7)) is None
    assert fit_affine([1, 2, 3], (2, 4, 6)) is None
    assert Affine(1, 3).at(64) == 193
    assert isinstance(mlp("2-2"), ModuleModel)
