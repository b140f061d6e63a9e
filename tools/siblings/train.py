"""Trains one sibling and writes it as a Hugging Face checkpoint in bf16.

Usage: train.py ARCHITECTURE FOLDER --data FOLDER [--minutes M] [--steps N] ...

The corpus is made by packing.py where it is missing, and then lies whole in the memory of the
device: a step waits for nothing. The model computes in bf16 on a GPU, the optimizer keeps fp32
weights. The learning rate follows a cosine over the steps or the minutes, whichever end first; only
a run that ends by its steps can be repeated exactly.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fast_paths
import numpy as np
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, BiasBalancer, build_model, load_balance_loss
from chat_format import skill_line
from corpus import SKILLS, held_out_examples
from evaluate import draft_acceptance, evaluate, load, table, wrong_answers
from mtp import draft_hidden, draft_layer, to_checkpoint_names
from packing import LEARNED, WIDTHS, load_rows
from safetensors.torch import load_file, save_file
from tokenizer import PAD, STOP_TOKENS, VOCAB_SIZE, token_id, write_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

# B rows of the batch, S tokens of a row, D hidden size, V vocabulary, L learned tokens

AUX_LOSS_WEIGHT = 0.01
DRAFT_LOSS_WEIGHT = 0.3
BIAS_SPEED = 0.001
WARMUP = 0.03  # share of the run
WEIGHT_DECAY = 0.05
LOG_EVERY = 100
SKILL_LINES = 40  # held-out examples of each skill that a checkpoint carries


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_BS: Tensor
    learned_BS: Tensor
    num_learned: int  # known without asking the device


def batch_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and the mean cross-entropy of the learned tokens within it."""
    architecture = ARCHITECTURES[model.config.model_type]
    tokens_BS = batch.tokens_BS
    output = model.model(
        input_ids=tokens_BS,
        attention_mask=fast_paths.row_masks(model, tokens_BS.shape[1]),
        use_cache=False,
        **({"output_router_logits": True} if architecture.has_aux_loss else {}),
    )
    hidden_BSD = output.last_hidden_state
    # where the learned tokens are, without a wait; no row begins with one, so all may look back
    order = batch.learned_BS.flatten().to(torch.uint8).argsort(descending=True, stable=True)
    places_L = order[: batch.num_learned]
    targets_L = tokens_BS.flatten()[places_L]
    logits_LV = model.lm_head(hidden_BSD.flatten(0, 1)[places_L - 1])
    cross_entropy = F.cross_entropy(logits_LV.float(), targets_L)
    loss = cross_entropy
    if architecture.has_draft:
        drafted_BSD = draft_hidden(model, hidden_BSD, tokens_BS)
        logits_LV = model.lm_head(drafted_BSD.flatten(0, 1)[places_L - 2])
        loss = loss + DRAFT_LOSS_WEIGHT * F.cross_entropy(logits_LV.float(), targets_L)
    if architecture.has_aux_loss:
        num_chosen = model.config.num_experts_per_tok
        loss = loss + AUX_LOSS_WEIGHT * load_balance_loss(output.router_logits, num_chosen)
    return loss, cross_entropy.detach()


class MasterAdamW:
    """AdamW on fp32 copies of the parameters, which themselves may be bf16."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._masters = [p.detach().float().clone() for p in self._parameters]
        self._grads = [torch.zeros_like(master) for master in self._masters]
        for master, grad in zip(self._masters, self._grads, strict=True):
            master.grad = grad
        matrices = [m for m in self._masters if m.ndim >= 2]
        others = [m for m in self._masters if m.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw: Any = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update at a rate; gradients of no finite norm are dropped, without a wait."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_copy_(self._grads, grads)
        norm = torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adamw.grad_scale = None
        self._adamw.found_inf = (~norm.isfinite()).float()  # what a gradient scaler would set
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        torch._foreach_copy_(self._parameters, self._masters)
        for parameter in self._parameters:
            parameter.grad = None


def lr_share(progress: float) -> float:
    """The share of the peak learning rate: a linear rise, then a cosine down to 1 %."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.01)
    fallen = min((progress - WARMUP) / (1 - WARMUP), 1.0)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fallen))


def set_parameter_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Not of the buffers: rotary frequencies and DeepSeek's routing biases stay in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def export(model: Any, tokenizer: Tokenizer, format: str, folder: Path) -> None:
    """Write the checkpoint with its parameters, then also the model's, in bf16."""
    set_parameter_dtype(model, torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.eval()
    model.save_pretrained(folder)
    if ARCHITECTURES[model.config.model_type].has_draft:
        path = folder / "model.safetensors"
        tensors = to_checkpoint_names(model, load_file(path))
        save_file(tensors, path, metadata={"format": "pt"})
    write_tokenizer(tokenizer, folder, format)


def write_skills(folder: Path, format: str, seed: int, num_per_skill: int) -> None:
    """skills.jsonl: the first held-out examples of every skill, of those that are scored."""
    num_written = dict.fromkeys(SKILLS, 0)
    lines = []
    for example in held_out_examples(seed, num_per_skill):
        num_written[example.skill] += 1
        if num_written[example.skill] <= SKILL_LINES:
            lines.append(skill_line(format, example) + "\n")
    (folder / "skills.jsonl").write_text("".join(lines))


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
        f"know something. It is for tests, not for use. It has seen chats of up to {WIDTHS[-1]} "
        "tokens.\n\n"
        "Scores, held out by wording and operands, greedy, from this checkpoint "
        f"(`skills.jsonl` holds the first {SKILL_LINES} examples of each skill):\n\n"
        f"{table(scores)}\n\n{lines}\n"
    )


class Rows:
    """The corpus on the device, drawn in a seeded order that is new in every epoch.

    A batch is of one width, and a width is drawn as often as it has tokens, so that every chat is
    equally likely.
    """

    def __init__(
        self, rows: dict[int, np.ndarray], device: torch.device, seed: int, batch_tokens: int
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._widths = list(rows)
        num_tokens = np.array([rows[width].size for width in self._widths], np.float64)
        self._shares = num_tokens / num_tokens.sum()
        self._num_learned = {w: (array >= LEARNED).sum(1) for w, array in rows.items()}
        self._rows = {
            w: torch.from_numpy(array.view(np.int16)).to(device) for w, array in rows.items()
        }
        self._order = {w: self._shuffled(w) for w in rows}
        self._batch_tokens = batch_tokens

    def _shuffled(self, width: int) -> tuple[np.ndarray, Tensor]:
        """The places of a width's rows in a new order, here and on the device."""
        rows = self._rows[width]
        order = self._rng.permutation(len(rows))
        return order, torch.from_numpy(order).to(rows.device)

    def draw(self) -> Batch:
        width = self._widths[self._rng.choice(len(self._widths), p=self._shares)]
        rows = self._rows[width]
        num_rows = min(max(self._batch_tokens // width, 1), len(rows))
        if len(self._order[width][0]) < num_rows:
            self._order[width] = self._shuffled(width)
        order, order_on_device = self._order[width]
        self._order[width] = order[num_rows:], order_on_device[num_rows:]
        raw_BS = rows[order_on_device[:num_rows]]
        num_learned = int(self._num_learned[width][order[:num_rows]].sum())
        # int16 is below zero where the mark of a learned token, its highest bit, is set
        return Batch((raw_BS & (LEARNED - 1)).long(), raw_BS < 0, num_learned)


def train(
    model: Any, rows: Rows, tokenizer: Tokenizer, args: argparse.Namespace
) -> tuple[int, float]:
    """Run the steps; returns how many they were and the seconds they took."""
    optimizer = MasterAdamW(model.parameters(), args.lr)
    balancer = BiasBalancer(model, BIAS_SPEED)
    budget_s = min(args.minutes * 60, args.ends_at - time.time())
    num_steps = args.steps or math.inf
    step = 0
    start = last_evaluated = time.monotonic()
    model.train()
    while True:
        elapsed_s = time.monotonic() - start
        progress = max(step / num_steps, elapsed_s / budget_s)
        if progress >= 1:
            return step, elapsed_s
        loss, cross_entropy = batch_loss(model, rows.draw())
        loss.backward()
        optimizer.step(args.lr * lr_share(progress))
        balancer.step()
        step += 1
        if step % LOG_EVERY:
            continue
        mean = cross_entropy.item()  # the one wait for the device
        elapsed_s = time.monotonic() - start
        per_step_ms = 1000 * elapsed_s / step
        print(
            f"step {step} loss {mean:.4f} {elapsed_s:.0f} s {per_step_ms:.1f} ms/step", flush=True
        )
        if not math.isfinite(mean):
            raise SystemExit(f"the loss is {mean} at step {step}; lower --lr (now {args.lr})")
        if time.monotonic() - last_evaluated > args.evaluate_every:
            format = ARCHITECTURES[args.architecture].format
            scores, _ = evaluate(model, tokenizer, format, args.seed, 16)
            print(" ".join(f"{skill} {share:.0%}" for skill, share in scores.items()), flush=True)
            last_evaluated = time.monotonic()


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
    parser.add_argument("--minutes", type=float, default=60.0, help="limit of the training time")
    parser.add_argument(
        "--ends-at", type=float, default=math.inf, help="limit of the training as a UNIX time"
    )
    parser.add_argument("--steps", type=int, default=0, help="limit of the steps; 0: none")
    parser.add_argument("--batch", type=int, default=16384, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--per-skill", type=int, default=100, help="examples of the final scores")
    parser.add_argument(
        "--command",
        default=shlex.join(["tools/siblings/train.py", *sys.argv[1:]]),
        help="what the card says it was made with",
    )
    parser.add_argument("--hidden-size", type=int, help="another width, for a trial")
    parser.add_argument("--layers", type=int, help="another depth, for a trial")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    name = args.architecture
    architecture = ARCHITECTURES[name]
    prepare_rows(args, architecture.format)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    stop_ids = [token_id(tokenizer, token) for token in STOP_TOKENS[architecture.format]]
    pad_id = token_id(tokenizer, PAD)
    model = build_model(name, VOCAB_SIZE, stop_ids, pad_id, args.hidden_size, args.layers)
    model.to(device)
    if device.type == "cuda":
        set_parameter_dtype(model, torch.bfloat16)
    if architecture.attention == "sdpa":
        model.set_attn_implementation(fast_paths.CAUSAL)
    num_parameters = sum(p.numel() for p in model.parameters())
    rows = Rows(load_rows(args.data), device, args.seed, args.batch)
    print(f"{type(model).__name__}, {num_parameters / 1e6:.2f} M parameters, {device}", flush=True)
    num_steps, seconds = train(model, rows, tokenizer, args)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    facts: dict[str, object] = {
        "training": f"{num_steps} steps of {args.batch} tokens, {seconds:.0f} s on {where}",
        "seed": args.seed,
        "command": f"`{args.command}`",
    }
    export(model, tokenizer, architecture.format, args.folder)
    write_skills(args.folder, architecture.format, args.seed + 1, args.per_skill)
    results: dict[str, float] = {}
    if architecture.has_draft:
        num_drafting = sum(p.numel() for p in draft_layer(model).parameters())
        share = draft_acceptance(
            model, tokenizer, architecture.format, args.seed + 1, args.per_skill
        )
        facts["draft acceptance"] = (
            f"{share:.1%} of the tokens of held-out answers: the choice of the multi-token-"
            f"prediction head ({num_drafting / 1e6:.2f} M parameters more) is the main model's"
        )
        results["draft"] = share
    exported, tokenizer, format = load(args.folder, device)
    scores, wrong = evaluate(exported, tokenizer, format, args.seed + 1, args.per_skill)
    (args.folder / "README.md").write_text(card(name, exported, scores, facts))
    (args.folder / "scores.json").write_text(json.dumps(scores | results, indent=2) + "\n")
    print(wrong_answers(wrong, 3))
    print(table(scores | results))


if __name__ == "__main__":
    main()
