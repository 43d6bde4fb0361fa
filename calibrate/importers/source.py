"""How every importer reads a file and says what is wrong with it: the file, the line, the rule and the mend."""

import gzip
import warnings
import zlib
from pathlib import Path

from calibrate.errors import MeasurementError

_GZIP_MAGIC = b"\x1f\x8b"


class MeasurementWarning(UserWarning):
    """Something in a file of measurements that was left out or looks wrong, while the rest was read."""


def read_text(path: str | Path) -> str:
    """The text of ``path``; gzipped content is recognised by its first bytes, whatever the name.

    Raises:
        MeasurementError: if the file is absent, unreadable, damaged or not text.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as problem:
        # gzip's own errors have no strerror
        reason = getattr(problem, "strerror", None) or str(problem)
        raise MeasurementError(f"cannot read '{path}': {reason}; check the path, or copy the file again") from problem
    except UnicodeDecodeError as problem:
        raise MeasurementError(
            f"cannot read '{path}': byte {problem.start} is not UTF-8 text; pass the log itself, not a binary"
        ) from problem


def warn(message: str) -> None:
    """Tells the caller of an importer what was left out or looks wrong."""
    warnings.warn(message, MeasurementWarning, stacklevel=3)
