"""Trains what drafts for the Llama sibling: an Eagle3 head, or a smaller Llama.

Usage: drafters.py eagle3|small FOLDER --target FOLDER --data FOLDER [--minutes M]

Both learn what the target itself would say next, on the corpus that it was trained on
(`packing.py` makes it where it is missing). An Eagle3 head reads hidden states of three of the
target's layers; it learns to go on from its own, too, so that later drafts are good as well. Runs
on a CPU in a quarter of an hour. The checkpoint is bf16, in the layout such heads are published in.
"""

import argparse
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from architectures import build_model
from packing import load_rows
from safetensors.torch import save_file
from tokenizer import PAD, STOP_TOKENS, VOCAB_SIZE, token_id
from tokenizers import Tokenizer
from torch import Tensor, nn
from train import MasterAdamW, Rows, lr_share, prepare_rows, set_parameter_dtype
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

# B rows, S tokens of a row, D hidden size, H heads, K sizes of heads, V vocabulary, L learned
# tokens, E hidden sizes of three layers

LAYERS = (1, 2, 4)  # of the target's six: what the head reads is behind them
DEPTH = 3  # drafts in a row that it learns to make
LATER_WEIGHT = 0.7  # of each further draft in the loss
SMALL = {"hidden_size": 128, "num_layers": 2}
LOG_EVERY_S = 20.0


class Eagle3(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads

        def linear(num_in: int, num_out: int) -> nn.Linear:
            layer = nn.Linear(num_in, num_out, bias=False)
            nn.init.normal_(layer.weight, std=num_in**-0.5)
            return layer

        attended, kept = self.num_heads * config.head_dim, self.num_kv_heads * config.head_dim
        self.fc, self.norm = linear(3 * size, size), LlamaRMSNorm(size, eps)
        self.lm_head = linear(size, config.vocab_size)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": LlamaRMSNorm(size, eps),
                "input_layernorm": LlamaRMSNorm(size, eps),
                "post_attention_layernorm": LlamaRMSNorm(size, eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * size, attended),
                        "k_proj": linear(2 * size, kept),
                        "v_proj": linear(2 * size, kept),
                        "o_proj": linear(attended, size),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(size, config.intermediate_size),
                        "up_proj": linear(size, config.intermediate_size),
                        "down_proj": linear(config.intermediate_size, size),
                    }
                ),
            }
        )

    def forward(self, states_BSE: Tensor, embedding_BSD: Tensor, rotary: Any) -> list[Tensor]:
        """What the output matrix reads, of each draft; at t they say t+2, whatever the draft.

        `embedding_BSD`: of token t+1. Draft d at t attends, as it will when it drafts, to keys of
        the target's states up to t - d + 1 and then to those of its own drafts before.
        """
        hidden_BSD = self.fc(states_BSE)
        keys: list[tuple[Tensor, Tensor]] = []
        said = []
        for _ in range(DEPTH):
            block: Any = self.midlayer
            both = (block["input_layernorm"](embedding_BSD), block["hidden_norm"](hidden_BSD))
            hidden_BSD = hidden_BSD + self._attended(torch.cat(both, -1), keys, rotary)
            x_BSD, mlp = block["post_attention_layernorm"](hidden_BSD), block["mlp"]
            gated = F.silu(mlp["gate_proj"](x_BSD)) * mlp["up_proj"](x_BSD)
            hidden_BSD = hidden_BSD + mlp["down_proj"](gated)
            said.append(self.norm(hidden_BSD))
            hidden_BSD = hidden_BSD.roll(1, dims=1)
        return said

    def _attended(self, x_BSD: Tensor, keys: list[tuple[Tensor, Tensor]], rotary: Any) -> Tensor:
        midlayer: Any = self.midlayer
        attention, num_kept = midlayer["self_attn"], self.num_heads // self.num_kv_heads
        q, k, v = (
            attention[f"{name}_proj"](x_BSD).unflatten(-1, (-1, self.config.head_dim))
            for name in "qkv"
        )
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *rotary)
        k = k.repeat_interleave(num_kept, dim=1)
        v = v.transpose(1, 2).repeat_interleave(num_kept, dim=1)
        keys.append((k, v))
        (first_k, first_v), depth, size = keys[0], len(keys), q.shape[2]
        scores = q @ first_k.mT
        unseen = torch.ones(size, size, dtype=torch.bool).triu(2 - depth)
        scores = scores.masked_fill(unseen, -math.inf)
        later = [  # draft d's own key lies d - depth behind
            ((q * k.roll(depth - at, dims=2)).sum(-1, keepdim=True), v.roll(depth - at, dims=2))
            for at, (k, v) in enumerate(keys[1:], start=2)
        ]
        all_scores = torch.cat([scores, *(score for score, _ in later)], -1)
        shares = (all_scores * self.config.head_dim**-0.5).softmax(-1)
        out = shares[..., :size] @ first_v
        for index, (_, value) in enumerate(later):
            out = out + shares[..., size + index, None] * value
        return attention["o_proj"](out.transpose(1, 2).flatten(2))

    def loss(self, target: Any, tokens_BS: Tensor, learned_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(to minimize; how often each draft is what the target says, where it is to learn)"""
        with torch.no_grad():
            states = target.model(input_ids=tokens_BS, output_hidden_states=True).hidden_states
            chosen_BS = target.lm_head(states[-1]).argmax(-1)  # of token t+1
            states_BSE = torch.cat([states[layer + 1] for layer in LAYERS], -1)
            next_BS = tokens_BS.roll(-1, dims=1)
            embedding_BSD = target.model.embed_tokens(next_BS)
            positions = torch.arange(tokens_BS.shape[1])[None]
            rotary = target.model.rotary_emb(embedding_BSD, positions)
        total, right = torch.zeros(()), []
        is_last = torch.zeros_like(learned_BS)
        is_last[:, -2:] = True
        for draft, x_BSD in enumerate(self(states_BSE, embedding_BSD, rotary)):
            places = learned_BS.roll(-2, dims=1) & ~is_last
            places[:, :draft] = False
            logits_LV = self.lm_head(x_BSD[places])
            wanted_L = chosen_BS.roll(-1, dims=1)[places]
            total = total + LATER_WEIGHT**draft * F.cross_entropy(logits_LV, wanted_L)
            right.append((logits_LV.argmax(-1) == wanted_L).float().mean())
        return total, torch.stack(right)

    def save(self, folder: Path) -> None:
        tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in self.state_dict().items()}
        size = self.config.vocab_size
        tensors |= {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size).bool()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        fields = vars(self.config) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": size,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


class SmallModel(nn.Module):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        (stop,) = (token_id(tokenizer, token) for token in STOP_TOKENS["chatml"])
        pad = token_id(tokenizer, PAD)
        self.model = build_model("llama", VOCAB_SIZE, [stop], pad, **SMALL)

    def loss(self, target: Any, tokens_BS: Tensor, learned_BS: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            chosen_BS = target(input_ids=tokens_BS).logits.argmax(-1)
        places = learned_BS.roll(-1, dims=1)
        places[:, -1] = False
        hidden_BSD = self.model.model(input_ids=tokens_BS).last_hidden_state
        logits_LV, wanted_L = self.model.lm_head(hidden_BSD[places]), chosen_BS[places]
        right = (logits_LV.argmax(-1) == wanted_L).float().mean()
        return F.cross_entropy(logits_LV, wanted_L), right[None]

    def save(self, folder: Path) -> None:
        set_parameter_dtype(self.model, torch.bfloat16)
        self.model.config.dtype = torch.bfloat16
        self.model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)


def train(drafter: Any, target: Any, rows: Rows, args: argparse.Namespace) -> int:
    optimizer = MasterAdamW(drafter.parameters(), args.lr)
    step, began, told = 0, time.monotonic(), 0.0
    while (elapsed := time.monotonic() - began) < args.minutes * 60:
        batch = rows.draw()
        loss, right = drafter.loss(target, batch.tokens_BS, batch.learned_BS)
        loss.backward()
        optimizer.step(args.lr * lr_share(elapsed / (args.minutes * 60)))
        step += 1
        if elapsed - told > LOG_EVERY_S:
            told = elapsed
            shares = " ".join(f"{share:.1%}" for share in right.tolist())
            print(f"step {step} {elapsed:.0f} s loss {loss.item():.3f} right {shares}", flush=True)
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("eagle3", "small"))
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--target", type=Path, required=True, help="the Llama sibling")
    parser.add_argument("--data", type=Path, required=True, help="packed corpus, made if missing")
    parser.add_argument("--docs", type=int, default=60_000, help="chats to generate if missing")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare_rows(args, "chatml")
    torch.manual_seed(args.seed)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    target.requires_grad_(False)
    drafter: Any
    if args.kind == "eagle3":
        kept = (
            "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps",
        )  # fmt: skip
        fields = {key: getattr(target.config, key) for key in kept}
        theta = target.config.rope_parameters["rope_theta"]
        drafter = Eagle3(SimpleNamespace(**fields, rope_theta=theta))
        drafter.lm_head.weight.data.copy_(target.lm_head.weight)
    else:
        drafter = SmallModel(Tokenizer.from_file(str(args.data / "tokenizer.json")))
    rows = Rows(load_rows(args.data), torch.device("cpu"), args.seed, args.batch)
    num_parameters = sum(p.numel() for p in drafter.parameters())
    print(f"{args.kind}: {num_parameters / 1e6:.2f} M parameters", flush=True)
    num_steps = train(drafter, target, rows, args)
    args.folder.mkdir(parents=True, exist_ok=True)
    drafter.save(args.folder)
    print(f"{num_steps} steps of {args.batch} tokens")


if __name__ == "__main__":
    main()
