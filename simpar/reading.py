"""Files that users name, as text or JSON, and YAML.

YAML is read by libyaml where PyYAML was built with it: a tenth of the time, which catalogs cost at each start.
"""

import errno
import json
from pathlib import Path
from typing import Any

import yaml

from simpar.units import MB

_LARGEST_FILE = 256 * MB

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Plain values only, no objects."""


def read_yaml(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML, nests too deep, or has a date or number that cannot be.

    >>> read_yaml("{a: [1, x]}")
    {'a': [1, 'x']}
    """
    try:
        return yaml.load(text, Loader=SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("it nests too deep") from None
    except ValueError:
        raise yaml.YAMLError("a date or a number in it is none that can be; quote it") from None


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, with a byte order mark or without.

    Raises:
        OSError: it cannot be read; ``strerror`` says why, also where it is endless (a pipe, a device), huge or no text.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > _LARGEST_FILE):
            raise OSError(errno.EINVAL, f"it is no file of at most {_LARGEST_FILE:,} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is no UTF-8 text") from None
    except (RuntimeError, ValueError) as error:  # links in a circle; a zero byte in the name
        raise OSError(errno.EINVAL, str(error)) from None


def read_json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is no JSON, nests too deep, or has a number of thousands of digits; the text says which.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nests too deep") from None
    except ValueError:
        raise ValueError("has a number of too many digits") from None
