"""``simpar topology``: a cluster's links as a table, or drawn as a page, coloured by the load of a job's step."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.terminal import check_outputs, show, simulated
from simpar.errors import JobError

if TYPE_CHECKING:
    from rich.table import Table

    from simpar.trace.trace import LinkUse, Trace

_KINDS = {
    "gpu": "GPU to its node",
    "nic": "NIC of a GPU",
    "ici": "chip to its neighbour",
    "leaf": "leaf to spine",
    "group": "between groups",
    "pcie": "GPU to its host",
    "ram": "memory of a host",
}


def topology(
    target: Annotated[
        str, typer.Argument(metavar="CLUSTER|JOB.yaml", help="Such as h100-sxm:4x8, a preset, or a job file.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Draw it as a page.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="FIELD=VALUE", help="Any field of the job; repeatable.", show_default=False
        ),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Light on dark.")] = False,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Simulate even if the job does not fit.")] = False,
) -> None:
    """Show the links of a cluster and, of a job, how busy its step keeps them; --html draws them."""
    from simpar.hardware.cluster import Cluster  # noqa: PLC0415

    path = Path(target)
    is_job = path.suffix in (".yaml", ".yml")
    if html is not None:
        check_outputs({"--html": html}, path if is_job else None)
    trace: Trace | None = None
    if is_job:
        result = simulated(path, {}, changes or (), allow_oom)
        cluster, trace = result.job.cluster, result.trace
        title = f"{result.job.model.name} on {cluster.gpus} × {cluster.device.name}, step {trace.step_s:.4g} s"
    else:
        if changes:
            raise JobError("--set changes fields of a job, but the target is a cluster; give a job file")
        cluster = Cluster.parse(target)
        title = f"{cluster.gpus} × {cluster.device.name}"
    if trace is not None:
        show(_table(trace.links, trace.step_s))
    elif html is None:
        show(_parts(cluster))
    if html is not None:
        from simpar.view.page import write_page  # noqa: PLC0415 - plotly takes a while
        from simpar.view.topology import topology_figure  # noqa: PLC0415

        write_page(topology_figure(cluster, trace, dark=dark, title=title), html, title=title)
        typer.echo(f"wrote {html}", err=True)


def _kind(name: str) -> str:
    found = re.match(r"[a-z]+", name)
    own = found is not None and found[0] in _KINDS and (">" not in name[:-1])
    return found[0] if found is not None and own else "edge"


def _table(links: "Iterable[LinkUse]", step_s: float) -> "Table":
    """One row per kind of link: how many were simulated, what the busiest carried."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from simpar.units import GB, format_bytes  # noqa: PLC0415

    kinds: defaultdict[str, list[LinkUse]] = defaultdict(list)
    for link in links:
        kinds[_kind(link.name)].append(link)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("links", "directions", "GB/s each", "busiest", "carries", "busy"):
        table.add_column(name, justify="left" if name in ("links", "busiest") else "right")
    for kind, used in kinds.items():
        busiest = max(used, key=lambda link: link.nbytes / link.capacity_bytes_per_s)
        table.add_row(
            _KINDS.get(kind, "edges of the graph"),
            f"{len(used):,}",
            f"{busiest.capacity_bytes_per_s / GB:.4g}",
            busiest.name,
            format_bytes(busiest.nbytes),
            f"{busiest.nbytes / busiest.capacity_bytes_per_s / step_s:.1%}" if step_s else "",
        )
    return table


def _parts(cluster: object) -> "Table":
    """What a cluster without a job consists of."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from simpar.hardware.cluster import Cluster  # noqa: PLC0415
    from simpar.units import GB  # noqa: PLC0415

    assert isinstance(cluster, Cluster), "parsed before"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "what"):
        table.add_column(name)
    link, fabric = cluster.node_link, cluster.fabric
    table.add_row("GPUs", f"{cluster.nodes:,} × {cluster.gpus_per_node:,} {cluster.device.name}")
    torus = link.torus(cluster.gpus_per_node)
    inside = f"{link.kind}, {link.bandwidth_bytes_per_s / GB:.4g} GB/s"
    if torus is not None:
        closed = ["closed" if wraps else "open" for wraps in torus.wraps]
        inside += f" a link, {'×'.join(map(str, torus.shape))} ({', '.join(closed)})"
    table.add_row("inside a node", inside)
    if fabric is not None and cluster.nodes > 1:
        pods = f", {fabric.topology.replace('_', ' ')} with {fabric.pod_nodes} nodes a leaf" if fabric.pod_nodes else ""
        table.add_row("between nodes", f"{cluster.nic_bytes_per_s / GB:.4g} GB/s a GPU{pods}")
    return table
