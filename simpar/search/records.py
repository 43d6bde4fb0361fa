"""Records as tables and files."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpar.errors import JobError
from simpar.trace.export import write_whole

if TYPE_CHECKING:
    import pandas as pd  # noqa: TID251 - for who asks for a table

Records = Sequence[Mapping[str, Any]]

FORMATS = (".csv", ".parquet", ".jsonl")


def columns(records: Records) -> list[str]:
    """Every key, in the order of first appearance."""
    return list(dict.fromkeys(key for record in records for key in record))


def data_frame(records: Records) -> "pd.DataFrame":
    """Records as a pandas table.

    Raises:
        JobError: pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415, TID251 - the user's choice, made by calling this
    except ImportError:
        raise JobError(
            "a data frame needs pandas, which is not installed; pip install pandas, or use records"
        ) from None
    return pd.DataFrame.from_records(list(records), columns=columns(records))


def write_records(records: Records, path: str | Path) -> None:
    """Writes CSV, Parquet (needs pandas with pyarrow) or JSON lines, by the name's ending.

    Raises:
        JobError: another ending, or Parquet without pandas and pyarrow.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    check_format(path)
    writers: dict[str, Callable[[Records], bytes]] = dict(zip(FORMATS, (_csv, _parquet, _jsonl), strict=True))
    write_whole(path, writers[path.suffix](records))


def check_format(path: Path) -> None:
    """Raises :class:`JobError` unless the name's ending is a format of tables."""
    if path.suffix not in FORMATS:
        raise JobError(f"{path}: '{path.suffix}' is no format of a table; end the name with {', '.join(FORMATS)}")


def _csv(records: Records) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(records), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def _jsonl(records: Records) -> bytes:
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()


def _parquet(records: Records) -> bytes:
    frame = data_frame(records)
    for name in frame.columns:  # a column of several kinds, such as "auto" beside numbers, has no Parquet type
        kinds = {type(value) for value in frame[name].dropna()}
        if not kinds <= {int, float} and not kinds <= {bool} and not kinds <= {str}:
            frame[name] = frame[name].map(str, na_action="ignore")
    data = io.BytesIO()
    try:
        frame.to_parquet(data)
    except ImportError:
        raise JobError("Parquet needs pyarrow, which is not installed; pip install pyarrow, or write .csv") from None
    return data.getvalue()
