"""The code in the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY


@pytest.mark.slow
def test_python_example_trains_and_exports(tmp_path, sentences):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (training,) = [block for block in blocks if "ContrastiveTrainer(" in block]
    (encoding,) = [block for block in blocks if "model.similarity" in block]
    (tmp_path / "my_sentences.txt").write_text("\n".join(sentences))
    (tmp_path / "model_cards").symlink_to(REPOSITORY / "model_cards")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for code in (training, encoding):  # the second loads what the first has saved
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert "tensor" in done.stdout


def test_linked_files_and_commands_exist():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(
        r"(?:examples|benchmarks)/[\w/.-]+\.(?:py|yaml|json)", text
    )
    assert len(paths) > 8
    for path in paths:
        assert (REPOSITORY / path).exists(), path
