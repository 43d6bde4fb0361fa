"""Tables of measured runs: one row a run, as CSV with a header.

A blank cell means that the source does not say. Columns that are not listed here are ignored.
"""

import csv
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from simpar.description import Description
from simpar.errors import RunsError, SimparError, nearest
from simpar.reading import read_text

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Flag = bool | None


class Run(Description):
    """One measured training step and its configuration; None where the source does not say.

    Attributes:
        id: name of the row.
        source, framework, model: who measured what with which software.
        gpu, gpus_per_node, num_gpus: the devices; ``gpu`` is a device of the catalog.
        fabric, nic_gbps_per_gpu: kind of network, and Gb/s of a GPU's share of the NICs.
        layers, hidden, heads, kv_heads, head_dim, ffn_hidden, gated_mlp, vocab, seq_len, tied_embeddings: the model.
        experts, top_k, moe_ffn_hidden, shared_expert_ffn, moe_layer_fraction: its experts.
        precision: dtype of compute.
        tp, pp, cp, dp, ep, etp, vpp: degrees.
        zero, fsdp_shard, reshard_after_forward: sharding; 3 is FSDP.
        sequence_parallel, micro_batch, grad_accum, global_batch: batch in samples; a fraction is per device.
        slices: of TPUs, which the data-center network connects.
        recompute, recompute_fraction: of layers; policies other than none, selective and full by their name.
        attention, compiled, tp_overlap, grad_bytes: kernels and overlap.
        step_time_s: one optimizer step, measured.
        peak_mem_gib: measured peak, where published.
        flag: why the row is suspicious; empty for none.
    """

    error_type: ClassVar[type[SimparError]] = RunsError

    id: str
    source: str = "runs"
    framework: str
    model: str = "model"
    gpu: str
    gpus_per_node: Count = 8
    num_gpus: Count
    fabric: str = ""
    nic_gbps_per_gpu: Positive | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn_hidden: Count | None = None
    gated_mlp: bool = True
    vocab: Count | None = None
    seq_len: Count | None = None
    tied_embeddings: bool = False
    experts: Count | None = None
    top_k: Count | None = None
    moe_ffn_hidden: Count | None = None
    shared_expert_ffn: Annotated[int, Field(ge=0)] | None = None
    moe_layer_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    precision: str = "bf16"
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dp: Count | None = None
    ep: Count = 1
    etp: Count | None = None
    vpp: Count = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    fsdp_shard: Count | None = None
    reshard_after_forward: Flag = None
    sequence_parallel: Flag = None
    micro_batch: Positive | None = None
    grad_accum: Count | None = None
    global_batch: Count | None = None
    slices: Count | None = None
    recompute: str | None = None
    recompute_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    attention: str | None = None
    compiled: Flag = None
    tp_overlap: Flag = None
    grad_bytes: Literal[2, 4] | None = None
    step_time_s: Positive
    peak_mem_gib: Positive | None = None
    flag: str = ""

    @field_validator("grad_bytes", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.strip().isdigit() else value

    @property
    def question(self) -> tuple[object, ...]:
        """What runs must share to be compared: the same model and batch on the same machines."""
        shape = (self.layers, self.hidden, self.heads, self.ffn_hidden, self.vocab, self.experts)
        return (self.source, self.gpu, self.num_gpus, self.precision, self.global_batch, self.seq_len, *shape)

    @property
    def level(self) -> tuple[str, str, str]:
        """Runs that one scale factor may serve: of one source, on one GPU, in one precision."""
        return (self.source, self.gpu, self.precision)


_NEEDED = tuple(name for name, field in Run.model_fields.items() if field.is_required())


def read_runs(path: str | Path) -> tuple[Run, ...]:
    """The runs of a CSV file, in its order.

    Raises:
        RunsError: the file cannot be read, lacks a column, or a cell is wrong; the message names file, line and column.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise RunsError(f"{path}: cannot be read ({error.strerror}); give the path of a CSV file") from None
    try:
        reader = csv.DictReader(text.splitlines(), strict=True)
        header = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = header
        _check_header(path, header)
        runs = tuple(_read_run(f"{path}:{reader.line_num}", cells) for cells in reader)
    except csv.Error as error:
        raise RunsError(f"{path}:{reader.line_num}: is not CSV ({error}); mend the quotes of this line") from None
    if not runs:
        raise RunsError(f"{path}: has a header but no row; add a run")
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise RunsError(f"{path}: the id '{run.id}' names two rows; give each row its own")
        seen.add(run.id)
    return runs


def _check_header(path: str | Path, header: list[str]) -> None:
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        other = next((mark for mark in (";", "\t") if len(header) == 1 and mark in header[0]), None)
        if other is not None:
            raise RunsError(f"{path}: separates its cells by {other!r}, but a CSV does so by ','; export it again")
        raise RunsError(
            f"{path}: has no column '{missing[0]}'{nearest(missing[0], header)}; it needs {', '.join(_NEEDED)}"
        )


def _read_run(where: str, cells: dict[str, Any]) -> Run:
    if None in cells:
        raise RunsError(f"{where}: has more cells than the header; quote cells that hold a comma")
    given = {name: cell.strip() for name, cell in cells.items() if name in Run.model_fields and cell and cell.strip()}
    try:
        return Run.model_validate(given)
    except SimparError as error:
        raise RunsError(f"{where}: {error}") from None
