"""Files that are whole or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Folders of a write in progress. No reader looks at them; the next run deletes those that a kill left behind.
STAGING_PREFIX = ".saving-"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary path that takes the place of ``path`` when the block ends well."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    yield temporary
    os.replace(temporary, path)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON, indented by two."""
    write_text(path, json.dumps(value, indent=2) + "\n")
