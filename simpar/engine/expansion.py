"""Operations of a trace: what each is made of, and its kernels as spans of their own."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from simpar.engine.price import BlockPrice, OpenedPrice, OperationPrice
from simpar.engine.rows import LabelColumns, Row, RunFields
from simpar.program.ir import COMPUTE
from simpar.trace.trace import (
    KINDS,
    NONE,
    FloatColumn,
    IntColumn,
    Lane,
    OperationDetails,
    Spans,
    Template,
    spans_from_columns,
)

_Columns = dict[str, "IntColumn | FloatColumn"]


def _inner_order(stream: str) -> tuple[int, str]:
    order = ("tp", "cp", "ep")
    return (order.index(stream) if stream in order else len(order), stream)


class Expansion:
    """Knows how every operation of a trace came about.

    Args:
        runs: one per operation.
        place: position of every row in the sorted columns.
        spans: the sorted operations.
        lanes: lanes of the simulated streams; lanes for collectives inside blocks are added in ``self.lanes``.
        children: kernels that were simulated one by one, each with its operation's row.
        labels: what the labels of rows stand for.
    """

    def __init__(  # noqa: PLR0917 - all that a trace tells of its operations
        self,
        runs: Sequence[RunFields],
        place: IntColumn,
        spans: Spans,
        lanes: Sequence[Lane],
        children: Sequence[tuple[Row, int]],
        labels: LabelColumns,
    ) -> None:
        self._spans = spans
        self._children = children
        self._place = place
        self._labels = labels
        rows, _, prices, *times = zip(*runs, strict=True) if runs else ((),) * 5
        index = {price: i for i, price in enumerate(dict.fromkeys(prices))}
        self._prices: list[OperationPrice | OpenedPrice] = list(index)
        self._template = np.array([index[price] for price in prices], np.int64)
        self._issue, self._gpu = (np.array(column, np.int64) for column in times)
        self._rows = place[np.array(rows, np.int64)]
        self.lanes = (*lanes, *self._inner_lanes(lanes))

    def _inner_lanes(self, lanes: Sequence[Lane]) -> list[Lane]:
        """Collectives inside blocks get lanes of their own, beside the compute lane of their rank."""
        blocks = {id(block): block for price in self._prices for block in price.blocks}.values()
        inner = sorted({name for block in blocks for name in block.streams[1:]}, key=_inner_order)
        known = {(lane.rank, lane.stream) for lane in lanes}
        return [
            Lane(lane.rank, lane.stage, stream, lane.replicas)
            for stream in inner
            for lane in lanes
            if lane.stream == COMPUTE and (lane.rank, stream) not in known
        ]

    @cached_property
    def _stream_lane(self) -> dict[str, IntColumn]:
        """Per stream, for each lane, that stream's lane of the same rank."""
        of_rank = {(lane.rank, lane.stream): i for i, lane in enumerate(self.lanes)}
        streams = {lane.stream for lane in self.lanes}
        return {
            stream: np.array([of_rank.get((lane.rank, stream), NONE) for lane in self.lanes], np.int64)
            for stream in streams
        }

    def details(self, rows: int) -> OperationDetails:
        """Per span: what it is made of, and what it waited for."""
        template, host, gpu = (np.full(rows, fill, np.int64) for fill in (NONE, 0, 0))
        template[self._rows] = self._template
        host[self._rows] = self._spans.duration_ns[self._rows] - self._gpu
        gpu[self._rows] = self._gpu
        templates = tuple(
            Template(
                busy_ns={KINDS[kind]: busy for kind, busy in price.busy_ns.items()},
                exposed_ns=price.exposed_ns,
                gpu_ns=price.gpu_ns,
                stream_busy_ns=price.stream_busy_ns,
            )
            for price in self._prices
        )
        return OperationDetails(template=template, gpu_ns=gpu, host_wait_ns=host, templates=templates)

    def kernels(self) -> Spans:
        """Every kernel and every collective of every operation, ordered by start."""
        parts: dict[str, list[IntColumn | FloatColumn]] = {name: [] for name in Spans.__dataclass_fields__}
        for number, price in enumerate(self._prices):
            mine = np.flatnonzero(self._template == number)
            free, issued = self._spans.start_ns[self._rows[mine]], self._issue[mine]
            for block, layer in zip(price.blocks, price.layers, strict=True):
                for name, column in self._block(block, layer, mine, free, issued).items():
                    parts[name].append(column)
                free, issued = (
                    np.maximum(free + block.gpu_ns, issued + block.host_ns),
                    issued + block.issue_ns,
                )
        for name, column in self._simulated().items():
            parts[name].append(column)
        merged = {name: np.concatenate(columns) for name, columns in parts.items()}
        order = np.lexsort((merged["lane"], merged["start_ns"]))
        return spans_from_columns({name: column[order] for name, column in merged.items()})

    def _block(self, block: BlockPrice, layer: int, mine: IntColumn, free: IntColumn, issued: IntColumn) -> _Columns:
        """The spans of one block in all runs of its operation: shape (runs, spans), flattened.

        Where collectives of other streams slowed an operation, its spans are stretched evenly.
        """
        parents = self._rows[mine]
        start, lane = self._spans.start_ns[parents][:, None], self._spans.lane[parents]
        stretch = (self._spans.duration_ns[parents] / np.maximum(self._undisturbed(mine), 1))[:, None]
        begin = np.maximum(free[:, None] + block.gpu_start_ns, issued[:, None] + block.host_start_ns) - start
        end = np.maximum(free[:, None] + block.gpu_end_ns, issued[:, None] + block.host_end_ns) - start
        # edges are rounded, not lengths, so that neighbours never overlap
        stretched_begin = np.rint(begin * stretch).astype(np.int64)
        stretched_end = np.rint(end * stretch).astype(np.int64)
        by_stream = np.array([self._stream_lane[name][lane] for name in block.streams])
        columns = {
            "start_ns": start + stretched_begin,
            "duration_ns": stretched_end - stretched_begin,
            "lane": by_stream[block.stream].T,
            "kind": block.kind,
            "name": block.name,
            "microbatch": self._spans.microbatch[parents][:, None],
            "chunk": self._spans.chunk[parents][:, None],
            "layer": np.int64(layer),
            "nbytes": block.nbytes,
            "flop": block.span_flop,
            "parent": parents[:, None],
            "predecessor": np.int64(NONE),
        }
        return {name: np.broadcast_to(column, begin.shape).ravel() for name, column in columns.items()}

    def _undisturbed(self, mine: IntColumn) -> IntColumn:
        """How long runs of one operation would have taken, bound by the device or by launches."""
        price = self._prices[int(self._template[mine[0]])]
        assert isinstance(price, OperationPrice), "only these have blocks"
        host_bound: IntColumn = self._issue[mine] + price.host_ns - self._spans.start_ns[self._rows[mine]]
        return np.maximum(host_bound, price.gpu_ns)

    def _simulated(self) -> _Columns:
        """Kernels of opened runs, as they were recorded."""
        rows = [row for row, _ in self._children]
        parents = self._place[np.array([parent for _, parent in self._children], np.int64)]
        times = np.array([(r.start_ns, r.end_ns - r.start_ns, r.lane) for r in rows], np.int64).reshape(-1, 3)
        label = np.array([row.label for row in rows], np.int64)
        value = self._labels.value[label]
        aside = np.array([self.lanes[row.lane].stream != COMPUTE for row in rows], np.bool_)
        return {
            **dict(zip(("start_ns", "duration_ns", "lane"), times.T, strict=True)),
            "kind": self._labels.kind[label],
            "name": self._labels.name[label],
            "microbatch": self._spans.microbatch[parents],
            "chunk": self._spans.chunk[parents],
            "layer": self._labels.layer[label],
            "nbytes": np.where(aside, value, 0.0),
            "flop": np.where(aside, 0.0, value),
            "parent": parents,
            "predecessor": np.full(len(rows), NONE, np.int64),
        }
