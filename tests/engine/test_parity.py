"""Same tokens and logits as transformers, through the server, on every path a request can take.

One model of each kind of attention, MLP and cache; the switches of a configuration are in
`tests/models/test_logit_parity.py`, other models of these kinds in `tests/engine/test_siblings.py`.

Each run proves from the engine's own counters that its path was really taken.
"""

import concurrent.futures

import pytest
import torch
from mxfp4_models import make_packed_checkpoint
from server_process import Server
from tiny_models import make_checkpoint, reference_model

NUM_TOKENS = 64
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LONG = dict(max_position_embeddings=256)
DEEPSEEK_YARN = YARN | dict(mscale=1.0, mscale_all_dim=1.0)
MODELS = {
    "deepseek_v3-yarn": ("deepseek_v3", LONG | {"rope_parameters": DEEPSEEK_YARN}),
    "gpt_oss-mxfp4-yarn": (
        "gpt_oss, packed",
        LONG | {"sliding_window": 24, "rope_parameters": YARN | {"truncate": False}},
    ),
    "llama-llama3-tied-bias": (
        "llama",
        LONG
        | {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "config_style": 4}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral-window": ("mistral", LONG | {"sliding_window": 24}),
    "qwen2-two-groups": (
        "qwen2",
        LONG | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3_moe": ("qwen3_moe", LONG | {"mlp_only_layers": [0]}),
    "qwen3_next": ("qwen3_next", LONG),
}
# Norms, some biases, the layers that make latents, routers, what is cut after loading.
ON_BOTH = ("norm", "bias", "_a_proj", "mlp.gate.", "router", "conv1d", "in_proj_ba")
IN_SETS = ("gpt_oss, packed", "qwen3_moe")  # two ranks hold other experts
ALIKE = ("mistral-window",)  # split among ranks as llama; qwen2 has windows, too
PLAIN = dict(dtype="float32", max_num_tokens=2048, disable_overlap_scheduler=True)
# 16 blocks of 16 tokens: three sequences of 64 + 64 do not fit together.
TIGHT = dict(
    dtype="float32", max_num_tokens=24, max_batch_size=16, disable_overlap_scheduler=False,
    kv_cache_config={"max_tokens": 256, "tokens_per_block": 16},
    scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
)  # fmt: skip


class Case:
    """A checkpoint, prompts, and what transformers makes of them."""

    def __init__(self, folder, arch, fields):
        if arch == "gpt_oss, packed":
            self.folder, plain = make_packed_checkpoint(folder, **fields), folder / "plain"
        else:
            self.folder = plain = make_checkpoint(folder, arch, **fields)
        # A state is kept in the middle of a prompt, where its chunk ends: after 32 of 50 tokens.
        self.has_states = arch == "qwen3_next"
        self.ep_size = 2 if arch in IN_SETS else 1
        self.model = reference_model(plain)
        generator = torch.Generator().manual_seed(7)
        vocab = self.model.config.vocab_size
        self.prompts = [
            torch.randint(10, vocab, (n,), generator=generator).tolist() for n in (50, 7, 33, 64, 1)
        ]
        self.expected = [self._generate(prompt) for prompt in self.prompts]
        self.logprobs = [
            self._logprobs(p + new) for p, new in zip(self.prompts, self.expected, strict=True)
        ]

    @torch.inference_mode()
    def _generate(self, prompt):
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def _logprobs(self, text):
        return self.model(torch.tensor([text])).logits[0].log_softmax(-1)

    def check(self, server, index, **fields):
        """One request: 64 greedy tokens identical, log-probabilities within 1e-4."""
        prompt, expected = self.prompts[index], self.expected[index]
        reply = server.post(
            "/v1/completions", model="m", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
            ignore_eos=True, detokenize=False, logprobs=1, **fields,
        )  # fmt: skip
        choice = reply["choices"][0]
        assert choice["token_ids"] == expected
        truth = self.logprobs[index]
        at = torch.arange(len(prompt) - 1, len(prompt) - 1 + NUM_TOKENS)
        ours = torch.tensor(choice["logprobs"]["token_logprobs"][-NUM_TOKENS:])
        torch.testing.assert_close(ours, truth[at, torch.tensor(expected)], atol=1e-4, rtol=0)
        for position, entry in enumerate(choice.get("prompt_logprobs") or [None]):
            for token_id, told in (entry or {}).items():
                theirs = truth[position - 1, int(token_id)].item()
                assert abs(told["logprob"] - theirs) < 1e-4, (position, token_id)
        return reply

    def check_all(self, server, repeat=1, **fields):
        """All prompts at once."""
        indices = list(range(len(self.prompts))) * repeat
        with concurrent.futures.ThreadPoolExecutor(len(indices)) as pool:
            list(pool.map(lambda i: self.check(server, i, **fields), indices))


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    arch, fields = MODELS[request.param]
    return Case(tmp_path_factory.mktemp(request.param), arch, fields)


def test_single_batched_and_prefix_hits(case):
    with Server(case.folder, **PLAIN) as server:
        case.check(server, 0, prompt_logprobs=20)
        single = server.counters()
        num_chunks = 2 if case.has_states else 1
        assert single["steps"] == NUM_TOKENS - 1 + num_chunks and single["prefix_hit_tokens"] == 0
        assert single["prefill_chunks"] == num_chunks and single["max_steps_in_flight"] == 1
        case.check_all(server, prompt_logprobs=20)
        batched = server.counters()
        assert batched["steps"] - single["steps"] < 5 * NUM_TOKENS, "requests ran one by one"
        assert batched["prefix_hit_tokens"] == 0, "scored prompts are computed"
        reply = case.check(server, 3)
        hit = server.counters()["prefix_hit_tokens"] - batched["prefix_hit_tokens"]
        assert hit == (32 if case.has_states else 63)
        shown = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert shown == 32  # of whole blocks
        assert server.counters()["used_blocks"] == 0


def test_chunked_overlapped_and_preempted(case):
    with Server(case.folder, **TIGHT) as server:
        case.check(server, 0, prompt_logprobs=20)
        alone = server.counters()
        assert alone["prefill_chunks"] == 3 and alone["max_steps_in_flight"] == 2
        assert alone["preemptions"] == 0
        case.check_all(server, repeat=2)
        crowded = server.counters()
        assert crowded["preemptions"] >= 1
        assert crowded["prefix_hit_tokens"] > 0
        assert crowded["used_blocks"] == 0


@pytest.mark.parametrize("case", [one for one in MODELS if one not in ALIKE], indirect=True)
def test_two_ranks(case):
    sizes = ("--tp_size", "2", "--ep_size", str(case.ep_size))
    with Server(case.folder, *sizes, device="cpu", **PLAIN) as server:
        case.check(server, 0, prompt_logprobs=20)
        case.check_all(server)
        first, second = server.version()["rank_weight_bytes"]
        total = sum(p.numel() * 4 for p in case.model.parameters())
        on_both = sum(
            p.numel() * 4
            for name, p in case.model.named_parameters()
            if any(part in name for part in ON_BOTH)
        )
        assert first == second
        reply = case.check(server, 3)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        # Matrices and the (padded) vocabulary are halved.
        assert first <= (total - on_both) / 2 + on_both + 64 * 2 * 4 * 64
        assert server.counters()["used_blocks"] == 0
