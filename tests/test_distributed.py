from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csl_hf.distributed import gather, gather_with_gradient, is_distributed

WORKER = Path(__file__).with_name("distributed_worker.py")


def start(folder: Path, tokenizer_folder: Path, processes: int) -> list[dict]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0"]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launcher, str(WORKER), str(folder), str(tokenizer_folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_backbone) -> dict[int, list[dict]]:
    return {n: start(tmp_path_factory.mktemp(f"processes{n}"), tiny_backbone, n) for n in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["reference", "paper"])
def test_two_processes_have_the_gradients_of_one(runs, gradient):
    alone, *ranks = runs[1][0][gradient], *(rank[gradient] for rank in runs[2])
    assert alone["processes"] == 1 and [rank["processes"] for rank in ranks] == [2, 2]
    assert max(g.abs().max() for g in alone["gradients"].values()) > 1e-3
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        for name, expected in alone["gradients"].items():
            torch.testing.assert_close(rank["gradients"][name], expected, atol=2e-6, rtol=1e-3, msg=name)
        for name, expected in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_paper_and_reference_gradients_differ(runs):
    """Otherwise the test above could compare a term that does nothing."""
    reference, paper = (runs[1][0][name]["gradients"] for name in ("reference", "paper"))
    name = "roberta.encoder.layer.1.output.dense.weight"
    assert (reference[name] - paper[name]).abs().max() > 1e-4


@pytest.mark.slow
def test_processes_agree_on_metrics_and_write_one_checkpoint(runs, tmp_path_factory):
    values = [rank["reference"]["evaluated"] for rank in runs[2]]
    assert values[0] == values[1] and len(values[0]) == 1
    folder = next(tmp_path_factory.getbasetemp().glob("processes2*")) / "reference"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    names = {path.name for path in (folder / "checkpoint-2").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "modules.json"} <= names


@pytest.mark.slow
def test_uneven_rows_are_gathered_in_order_with_their_gradients(runs):
    ranks = [rank["gather"] for rank in runs[2]]
    for rank in ranks:
        assert rank["everything"].flatten().tolist() == [0.0, 10.0, 11.0]
        assert rank["plain"].flatten().tolist() == [0.0, 10.0, 11.0]
        # every rank's loss is the sum of squares: 2 x, times 2 processes for the average that DDP takes
        torch.testing.assert_close(rank["gradient"], 4 * rank["rows"])


def test_alone_nothing_is_gathered():
    rows = torch.randn(3, 2, requires_grad=True)
    assert not is_distributed()
    assert gather(rows) is rows and gather_with_gradient(rows) is rows
