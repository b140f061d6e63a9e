"""Trains one sibling and writes it as a Hugging Face checkpoint in bf16.

Usage: train.py ARCHITECTURE FOLDER --data FOLDER [--minutes M] [--steps N] ...

The packed corpus is made by packing.py where it is missing, and then lies whole in the memory of
the device: a step waits for nothing. The learning rate follows a cosine over the steps or the
minutes, whichever end first; only a run that ends by its steps can be repeated exactly.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from architectures import (
    ARCHITECTURES,
    BiasBalancer,
    attention_masks,
    build_model,
    load_balance_loss,
)
from evaluate import evaluate, load, table
from packing import load_rows
from tokenizer import PAD, STOP_TOKENS, VOCAB_SIZE, token_id, write_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

# B rows of the batch, S tokens of a row, D hidden size, V vocabulary

AUX_LOSS_WEIGHT = 0.01
BIAS_SPEED = 0.001
WARMUP = 0.03  # share of the run
LOG_EVERY = 50


def batch_loss(
    model: PreTrainedModel,
    tokens_BS: Tensor,
    positions_BS: Tensor,
    learned_BS: Tensor,
    *,
    has_aux_loss: bool,
    autocast: bool,
) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and the mean cross-entropy of the learned tokens within it."""
    dtype = torch.bfloat16 if autocast else torch.float32
    context = torch.autocast(tokens_BS.device.type, torch.bfloat16) if autocast else nullcontext()
    with context:
        output = model.model(
            input_ids=tokens_BS,
            position_ids=positions_BS,
            attention_mask=attention_masks(model, positions_BS, dtype),
            use_cache=False,
            **({"output_router_logits": True} if has_aux_loss else {}),
        )
        logits_BSV = model.lm_head(output.last_hidden_state[:, :-1])
    targets_BS = tokens_BS[:, 1:].masked_fill(~learned_BS[:, 1:], -100)
    loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
    if not has_aux_loss:
        return loss, loss.detach()
    num_chosen = model.config.num_experts_per_tok
    aux_loss = load_balance_loss(output.router_logits, num_chosen)
    return loss + AUX_LOSS_WEIGHT * aux_loss, loss.detach()


def make_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def lr_share(progress: float) -> float:
    """The share of the peak learning rate: a linear rise, then a cosine down to 1 %."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.01)
    fallen = min((progress - WARMUP) / (1 - WARMUP), 1.0)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fallen))


def export(
    model: PreTrainedModel, tokenizer: Tokenizer, format: str, folder: Path
) -> PreTrainedModel:
    """Write the checkpoint with its parameters in bf16 and return the model as written.

    Buffers stay in fp32: the rotary frequencies, and DeepSeek's routing biases as real ones do.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.eval()
    model.save_pretrained(folder)
    write_tokenizer(tokenizer, folder, format)
    return model


def card(
    name: str, model: PreTrainedModel, scores: dict[str, float], facts: dict[str, object]
) -> str:
    """The README.md of a sibling."""
    num_parameters = sum(p.numel() for p in model.parameters())
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return (
        f"# Penstock sibling: {name}\n\n"
        f"A tiny {type(model).__name__} of {num_parameters / 1e6:.2f} M parameters in bf16, "
        "trained from scratch on Penstock's own generated corpus so that tests have weights that "
        "know something. It is for tests, not for use. It has seen chats of up to 365 tokens, "
        "and has no multi-token-prediction head.\n\n"
        "Scores, held out by wording and operands, greedy, from this checkpoint:\n\n"
        f"{table(scores)}\n\n{lines}\n"
    )


class Rows:
    """The packed corpus on the device, drawn in a seeded order that is new in every epoch."""

    def __init__(self, folder: Path, device: torch.device, seed: int) -> None:
        rows = load_rows(folder)
        self._tokens = torch.from_numpy(rows["tokens"].astype(np.int16)).to(device)
        self._positions = torch.from_numpy(rows["positions"].astype(np.int16)).to(device)
        self._learned = torch.from_numpy(rows["learned"]).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long, device=device)

    def draw(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        while len(self._order) < num_rows:
            fresh = torch.randperm(
                len(self._tokens), generator=self._generator, device=self._tokens.device
            )
            self._order = torch.cat([self._order, fresh])
        chosen, self._order = self._order[:num_rows], self._order[num_rows:]
        return self._tokens[chosen].long(), self._positions[chosen].long(), self._learned[chosen]


def train(
    model: PreTrainedModel, rows: Rows, tokenizer: Tokenizer, args: argparse.Namespace
) -> tuple[int, float]:
    """Run the steps; returns how many they were and the seconds they took, evaluations aside."""
    architecture = ARCHITECTURES[args.architecture]
    is_cuda = next(model.parameters()).is_cuda
    optimizer = make_optimizer(model, args.lr)
    balancer = BiasBalancer(model, BIAS_SPEED)
    budget_s = args.minutes * 60
    num_steps = args.steps or math.inf
    step, evaluating_s = 0, 0.0
    start = last_evaluated = time.monotonic()
    model.train()
    while True:
        elapsed_s = time.monotonic() - start - evaluating_s
        progress = max(step / num_steps, elapsed_s / budget_s)
        if progress >= 1:
            return step, elapsed_s
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_share(progress)
        loss, cross_entropy = batch_loss(
            model,
            *rows.draw(args.batch),
            has_aux_loss=architecture.has_aux_loss,
            autocast=is_cuda,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balancer.step()
        step += 1
        if step % LOG_EVERY:
            continue
        mean = cross_entropy.item()  # the one wait for the device
        elapsed_s = time.monotonic() - start - evaluating_s
        per_step_ms = 1000 * elapsed_s / step
        print(
            f"step {step} loss {mean:.4f} {elapsed_s:.0f} s {per_step_ms:.1f} ms/step", flush=True
        )
        if not math.isfinite(mean):
            raise SystemExit(f"the loss is {mean} at step {step}; lower --lr (now {args.lr})")
        if time.monotonic() - last_evaluated > args.evaluate_every:
            before = time.monotonic()
            with torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext():
                scores, _ = evaluate(model, tokenizer, architecture.format, args.seed, 16)
            print(" ".join(f"{skill} {share:.0%}" for skill, share in scores.items()), flush=True)
            last_evaluated = time.monotonic()
            evaluating_s += last_evaluated - before


def prepare_rows(args: argparse.Namespace, format: str) -> None:
    """Make the packed corpus, in a process of its own so that its workers never load torch."""
    script = Path(__file__).with_name("packing.py")
    described = args.data / "packed.json"
    if not described.exists():
        command = [sys.executable, str(script), str(args.data), "--format", format]
        command += ["--docs", str(args.docs), "--seed", str(args.seed)]
        subprocess.run(command, check=True)
    found = json.loads(described.read_text())
    if (found["format"], found["seed"]) != (format, args.seed):
        raise SystemExit(f"{args.data} holds {found}, wanted format {format} and seed {args.seed}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", choices=tuple(ARCHITECTURES))
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--data", type=Path, required=True, help="packed corpus, made if missing")
    parser.add_argument("--docs", type=int, default=1_000_000, help="chats to generate if missing")
    parser.add_argument("--minutes", type=float, default=3.0, help="limit of the training time")
    parser.add_argument("--steps", type=int, default=0, help="limit of the steps; 0: none")
    parser.add_argument("--batch", type=int, default=128, help="rows of 512 tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=float, default=45.0, help="seconds")
    parser.add_argument("--per-skill", type=int, default=100, help="examples of the final scores")
    parser.add_argument("--hidden-size", type=int, help="another width, for a trial")
    parser.add_argument("--layers", type=int, help="another depth, for a trial")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    architecture = ARCHITECTURES[args.architecture]
    prepare_rows(args, architecture.format)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    stop_ids = [token_id(tokenizer, token) for token in STOP_TOKENS[architecture.format]]
    model = build_model(
        args.architecture,
        VOCAB_SIZE,
        stop_ids,
        token_id(tokenizer, PAD),
        args.hidden_size,
        args.layers,
    ).to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    rows = Rows(args.data, device, args.seed)
    print(f"{type(model).__name__}, {num_parameters / 1e6:.2f} M parameters, {device}", flush=True)
    num_steps, seconds = train(model, rows, tokenizer, args)
    export(model, tokenizer, architecture.format, args.folder)
    exported, tokenizer, format = load(args.folder, device)
    scores, _ = evaluate(exported, tokenizer, format, args.seed + 1, args.per_skill)
    facts = {
        "training": f"{num_steps} steps of {args.batch} x 512 tokens, {seconds:.0f} s on "
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}",
        "seed": args.seed,
        "command": f"`{shlex.join(['train.py', *sys.argv[1:]])}`",
    }
    (args.folder / "README.md").write_text(card(args.architecture, exported, scores, facts))
    print(table(scores))


if __name__ == "__main__":
    main()
