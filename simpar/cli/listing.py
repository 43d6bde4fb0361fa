"""What the catalog knows by name, as Rich tables for ``simpar models`` and ``simpar clusters``."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from simpar.hardware.cluster import (
    cluster_presets,
    fabric_names,
    host_names,
    named_fabric,
    named_host,
    named_node_link,
    node_link_names,
)
from simpar.hardware.device import ALIASES, device, device_names
from simpar.model.presets import preset, preset_names
from simpar.model.transformer import Transformer
from simpar.units import TB, TFLOP, format_bytes, format_count


def list_models() -> Group:
    """The presets with their sizes, and what else a model may be."""
    rows = (_model_row(preset(name)) for name in preset_names())
    return Group(
        _table("models", ("name", "parameters", "layers", "hidden", "heads", "kv", "ffn", "vocab"), rows),
        Text(),
        Text("Also: the path of a Hugging Face config.json, mlp:784-500-10, or (in a job file) Transformer fields."),
    )


def _model_row(model: Transformer) -> tuple[str, ...]:
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn_hidden, model.vocab)
    return (model.name, format_count(model.parameters), *(str(size) for size in sizes))


def list_clusters() -> Group:
    """Devices, node links, fabrics, hosts and clusters, one line each."""
    links = ((name, named_node_link(name).about) for name in node_link_names())
    hosts = ((name, named_host(name).about) for name in host_names())
    fabrics = ((name, named_fabric(name).about) for name in fabric_names())
    return Group(
        _table(
            "devices", ("name", "memory", "TB/s", "TFLOP/s", "product"), map(_device_row, device_names()), texts=(4,)
        ),
        Text(),
        _table("node links", ("name", "what it is"), links, texts=(1,)),
        Text(),
        _table("fabrics", ("name", "what it is"), fabrics, texts=(1,)),
        Text(),
        _table("hosts", ("name", "what it is"), hosts, texts=(1,)),
        Text(),
        _table("clusters", ("name", "what it is"), cluster_presets().items(), texts=(1,)),
        Text(),
        Text(
            "A cluster is device:nodesxGPUs[@fabric], such as h100-sxm:64x8 or a100-sxm:16x8@efa-p4de, or one of these."
        ),
    )


def _device_row(name: str) -> tuple[str, ...]:
    found = device(name)
    dtype = next((dtype for dtype in ("bf16", "fp16", "fp32") if dtype in found.peak_flop_per_s), None)
    assert dtype is not None, "every device of the catalog has one of these dtypes"
    short = ", ".join(alias for alias, of in ALIASES.items() if of == name)
    return (
        name,
        format_bytes(found.memory_bytes),
        f"{found.memory_bytes_per_s / TB:.3g}",
        f"{found.peak_flop_per_s[dtype] / TFLOP:,.4g} {dtype}",
        f"{found.title}{f' (also: {short})' if short else ''}",
    )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Sequence[int] = ()) -> Group:
    """A table whose first column and ``texts`` are words and whose other columns are numbers, below its title."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, head in enumerate(heads):
        words = number == 0 or number in texts
        table.add_column(head, justify="left" if words else "right", no_wrap=number not in texts)
    for row in rows:
        table.add_row(*row)
    return Group(Text(title, style="bold"), table)
