"""Records a module's training step on the meta device.

Imports torch; :func:`simpar.model.module.trace_module` imports this module when it is called. Forward
operators are seen by a dispatch mode and belong to the layer whose hook fired last. Every autograd node gets
the layer in which it was made, so that backward operators can be given back to their layer.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from simpar.errors import ModelError
from simpar.model.fused import fused_kernels
from simpar.model.module import ModuleLayer, ModuleModel, fit_bytes, fit_kernels
from simpar.model.operators import dtype_name, kernels_of
from simpar.model.work import Kernel

_BEFORE_ANY = -1  # the layer of work that runs before the first layer: handed to that one in the end


def trace(
    module: nn.Module,
    sample_inputs: Any,
    *,
    loss: Callable[..., Tensor] | None,
    target: Tensor | None,
    name: str | None,
) -> ModuleModel:
    """See :func:`simpar.model.module.trace_module`."""
    name = name or type(module).__name__
    if loss is None and target is not None:
        raise ModelError(f"{name} has a target but no loss; give the loss that compares with it, or no target")
    batch = _batch_of(sample_inputs, name)
    batches = (2, 3, batch if batch > 3 else 5)
    runs = []
    for size in batches:
        try:
            runs.append(_run(module, sample_inputs, loss, target, batch, size))
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
            raise ModelError(
                f"{name} cannot be traced at batch {size} on the meta device"
                f" ({type(error).__name__}: {reason}); a module can be traced if its control flow does not"
                " depend on values and its batch is dimension 0 of its inputs"
            ) from error
    if len({tuple(run.order) for run in runs}) != 1:
        raise ModelError(f"{name} runs its layers in another order at another batch size; trace a module that does not")
    return ModuleModel(name=name, layers=_layers(module, runs, batches, name), dtype=_main_dtype(module))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _batch_of(sample_inputs: Any, name: str) -> int:
    for tensor in _tensors(sample_inputs):
        if tensor.dim() > 0 and tensor.shape[0] > 0:
            return tensor.shape[0]
    raise ModelError(f"{name} has no sample input with a batch dimension; give a tensor whose dimension 0 is the batch")


def _resized(value: Any, batch: int, size: int) -> Any:
    """The same structure on the meta device, with ``size`` instead of ``batch`` samples."""
    if isinstance(value, Tensor):
        shape = list(value.shape)
        if shape and shape[0] == batch:
            shape[0] = size
        return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _resized(item, batch, size) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_resized(item, batch, size) for item in value)
    return value


def _meta_copy(module: nn.Module) -> nn.Module:
    """A copy whose tensors hold no data; what is one tensor in the module is one in the copy."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if not isinstance(tensor, Tensor) or id(tensor) in memo:
                continue
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def _units(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts that become layers: direct children with parameters, containers flattened once."""
    units: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            units += [(f"{name}.{inner}", part) for inner, part in child.named_children()]
        elif isinstance(child, nn.ModuleDict):
            units += [(f"{name}.{inner}", part) for inner, part in child.items()]
        elif not isinstance(child, nn.ParameterList | nn.ParameterDict):
            units.append((name, child))
    return [unit for unit in units if any(True for _ in unit[1].parameters())]


@dataclass
class _Run:
    """What one training step left behind, by index of the layer."""

    layer: int = _BEFORE_ANY
    backward: bool = False
    order: list[int] = field(default_factory=list)
    kernels: dict[tuple[int, bool], list[Kernel]] = field(default_factory=dict)
    saved: Counter[int] = field(default_factory=Counter)
    received: dict[int, int] = field(default_factory=dict)
    output_bytes: int = 0

    def add(self, *kernels: Kernel) -> None:
        self.kernels.setdefault((self.layer, self.backward), []).extend(kernels)

    def of(self, layer: int, backward: bool) -> list[Kernel]:
        """Kernels of a layer; the first one to run also has what ran before it (backward: after it)."""
        own = self.kernels.get((layer, backward), [])
        early = self.kernels.get((_BEFORE_ANY, backward), []) if self.is_first(layer) else []
        return own + early if backward else early + own

    def saved_by(self, layer: int) -> int:
        return self.saved[layer] + (self.saved[_BEFORE_ANY] if self.is_first(layer) else 0)

    def is_first(self, layer: int) -> bool:
        return layer == (self.order[0] if self.order else 0)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of every operator that runs."""

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._run.add(*kernels_of(func, args, tuple(_tensors(out))))
        return out


class _NodeLabels(TorchFunctionMode):
    """Gives every autograd node the layer that was running when it was made."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run
        self._layers: dict[Node, int] = {}  # also keeps the nodes' Python objects, and with them their identity, alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.label(out)
        return out

    def label(self, value: Any) -> None:
        """Labels all nodes behind these tensors that have no label yet."""
        waiting = [tensor.grad_fn for tensor in _tensors(value) if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._layers or type(node).__name__ == "AccumulateGrad":
                continue
            self._layers[node] = self._run.layer
            waiting += [before for before, _ in node.next_functions if before is not None]

    def follow_backward(self) -> None:
        """From now on the run's layer is that of the node whose gradient is being computed."""
        self._run.backward = True
        for node, layer in self._layers.items():
            node.register_prehook(self._enter(layer))

    def _enter(self, layer: int) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            self._run.layer = layer

        return enter


class _Savings:
    """Counts the bytes that autograd keeps: each storage once, parameters and buffers not at all."""

    def __init__(self, run: _Run, module: nn.Module) -> None:
        self._run = run
        kept = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
        self._seen = {storage._cdata: storage for storage in kept}  # keeping them alive keeps the keys unique

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self._run.saved[self._run.layer] += storage.nbytes()
        return tensor

    @staticmethod
    def unpack(tensor: Tensor) -> Tensor:
        return tensor


def _run(  # noqa: PLR0917 - the arguments of trace() and two sizes
    module: nn.Module,
    sample: Any,
    loss: Callable[..., Tensor] | None,
    target: Tensor | None,
    batch: int,
    size: int,
) -> _Run:
    """One forward and backward pass over ``size`` samples."""
    run, model = _Run(), _meta_copy(module)
    inputs, goal = _resized(sample, batch, size), _resized(target, batch, size)
    labels, savings = _NodeLabels(run), _Savings(run, model)
    for index, (_, unit) in enumerate(_units(model)):
        unit.register_forward_pre_hook(_entering(run, labels, index), with_kwargs=True)
    with ExitStack() as stack:
        library = fused_kernels(run.add)
        stack.callback(library._destroy)  # at once, also when an error keeps this frame alive
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(labels)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(savings.pack, savings.unpack))
        stack.enter_context(_Operators(run))
        out = _call(model, inputs)
        run.output_bytes = sum(tensor.nbytes for tensor in _tensors(out))
        ends = out if loss is None else loss(out) if goal is None else loss(out, goal)
        labels.label(ends)
        labels.follow_backward()
        _differentiate(model, inputs, ends)
    return run


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _entering(run: _Run, labels: _NodeLabels, index: int) -> Callable[[nn.Module, Any, Any], None]:
    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        labels.label((args, kwargs))
        if index not in run.received:
            run.order.append(index)
            run.received[index] = sum(tensor.nbytes for tensor in _tensors((args, kwargs)))
        run.layer = index

    return enter


def _differentiate(model: nn.Module, inputs: Any, ends: Any) -> None:
    roots = [tensor for tensor in _tensors(ends) if tensor.requires_grad]
    leaves = [tensor for tensor in (*model.parameters(), *_tensors(inputs)) if tensor.requires_grad]
    if not roots or not leaves:
        raise ModelError(
            f"{type(model).__name__} has nothing to train: its output depends on no tensor that requires a"
            " gradient; give a module with trainable parameters"
        )
    torch.autograd.grad(roots, leaves, [torch.empty_like(root) for root in roots], allow_unused=True)


def _layers(module: nn.Module, runs: list[_Run], batches: tuple[int, ...], name: str) -> tuple[ModuleLayer, ...]:
    units = _units(module) or [(type(module).__name__, module)]
    first = runs[0]
    order = list(first.order) or [0]
    order += [
        index for index in range(len(units)) if index not in order
    ]  # never called, but their parameters are there
    owners = _owners(module, [units[index][1] for index in order])
    layers = []
    for position, (index, parameters) in enumerate(zip(order, owners, strict=True)):
        where = f"{name}, layer {units[index][0]}"
        after = order[position + 1] if position + 1 < len(order) else None
        sent = [run.output_bytes if after is None else run.received.get(after, run.output_bytes) for run in runs]
        layers.append(
            ModuleLayer(
                name=units[index][0],
                parameters=sum(p.numel() for p in parameters),
                trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
                forward_forms=fit_kernels([run.of(index, False) for run in runs], batches, f"{where}, forward"),
                backward_forms=fit_kernels([run.of(index, True) for run in runs], batches, f"{where}, backward"),
                saved_bytes=fit_bytes([run.saved_by(index) for run in runs], batches, f"{where}, kept activations"),
                sent_bytes=fit_bytes(sent, batches, f"{where}, output"),
            )
        )
    return tuple(layers)


def _owners(module: nn.Module, units: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Parameters of each layer: shared ones in the first that has them, the module's own in the first."""
    seen: set[int] = set()
    owners: list[list[nn.Parameter]] = []
    for unit in units:
        owners.append([p for p in unit.parameters() if id(p) not in seen])
        seen.update(id(p) for p in owners[-1])
    owners[0] += [p for p in module.parameters() if id(p) not in seen]
    return owners


def _main_dtype(module: nn.Module) -> Any:
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        counts[parameter.dtype] += parameter.numel()
    return dtype_name(counts.most_common(1)[0][0]) if counts else "fp32"
