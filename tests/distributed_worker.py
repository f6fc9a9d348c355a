"""Started by test_distributed.py with torchrun, or alone: trains two steps and writes the gradients of the first."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import tiny_model
from datasets import Dataset
from transformers import TrainerCallback

from csl_hf.arguments import ContrastiveTrainingArguments
from csl_hf.distributed import gather, gather_with_gradient
from csl_hf.modeling import set_dropout
from csl_hf.trainer import ContrastiveTrainer


class FirstGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            self.found = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


def pairs(count: int) -> Dataset:
    """Random views of different lengths; rows 1 and 6 hold the same text."""
    generator = torch.Generator().manual_seed(0)
    views = [
        [torch.randint(5, 300, (3 + (i + v) % 7,), generator=generator).tolist() for v in range(2)]
        for i in range(count)
    ]
    return Dataset.from_dict(
        {"views": views, "text_id": [6 if i == 1 else i for i in range(count)], "row": list(range(count))}
    )


def train(folder: Path, gradient: str, tokenizer) -> dict:
    """Two steps at a global batch of 12 without dropout, so that every process count must agree."""
    model = tiny_model(neighborhood_gradient=gradient, radius=0.5)
    set_dropout(model.config, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    probe = FirstGradients()
    args = ContrastiveTrainingArguments(
        output_dir=str(folder / gradient), global_batch_size=12, max_steps=2, learning_rate=1e-2, use_cpu=True,
        optim="sgd", max_grad_norm=0.0, logging_steps=1, save_strategy="steps", save_steps=1, report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, eval_strategy="steps", eval_steps=2,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = ContrastiveTrainer(
        model, args, pairs(24), tokenizer, evaluators={"probe": lambda encode: {"value": encode(["a"])[0].sum()}},
        callbacks=[probe],
    )  # fmt: skip
    output = trainer.train()
    evaluated = [entry["eval_value"] for entry in trainer.state.log_history if "eval_value" in entry]
    return {
        "gradients": probe.found,
        "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluated": evaluated,
        "processes": args.world_size,
        "steps": output.global_step,
    }


def gather_unevenly() -> dict:
    """Each rank brings rank + 1 rows; every rank computes the same loss on all of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = (torch.arange(rank + 1.0) + 10 * rank).unsqueeze(1).requires_grad_()
    everything = gather_with_gradient(rows)
    (everything**2).sum().backward()
    return {"everything": everything.detach(), "plain": gather(rows), "rows": rows.detach(), "gradient": rows.grad}


if __name__ == "__main__":
    from transformers import AutoTokenizer

    folder = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
    found = {gradient: train(folder, gradient, tokenizer) for gradient in ("reference", "paper")}
    found["gather"] = gather_unevenly()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(found, folder / f"rank{rank}.pt")
