"""Each architecture trains, exports and reloads; the fast paths compute what transformers does."""

import json
import subprocess
import sys
from pathlib import Path

import fast_paths
import mtp
import pytest
import torch
import train_all
from architectures import ARCHITECTURES, BiasBalancer, build_model
from corpus import train_examples
from evaluate import draft_acceptance, evaluate, load
from packing import LEARNED, Encoder, encode, rows_by_width
from safetensors import safe_open
from tokenizer import PAD, STOP_TOKENS, VOCAB_SIZE
from train import Batch, MasterAdamW, Rows, batch_loss, export, lr_share, set_parameter_dtype
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

DRAFTING = [name for name, architecture in ARCHITECTURES.items() if architecture.has_draft]
CPU = torch.device("cpu")


def fresh(name, tokenizer, **shape):
    """A model as it trains: without masks where it can."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    stops = [tokenizer.token_to_id(t) for t in STOP_TOKENS[architecture.format]]
    model = build_model(name, VOCAB_SIZE, stops, tokenizer.token_to_id(PAD), **shape)
    if architecture.attention == "sdpa":
        model.set_attn_implementation(fast_paths.CAUSAL)
    return model


def batch_of(name, tokenizer, num_rows=4):
    docs = encode(Encoder(tokenizer), ARCHITECTURES[name].format, train_examples(0, 60))
    raw = max(rows_by_width(docs, tokenizer.token_to_id(PAD)).values(), key=len)[:num_rows]
    tokens = torch.from_numpy((raw % LEARNED).astype("int64"))
    learned = torch.from_numpy(raw >= LEARNED)
    return Batch(tokens, learned, int(learned.sum()))


def shaken(model):
    """Biases, routers and norms start near nothing: make them matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(params=ARCHITECTURES)
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_and_reloads_with_the_same_logits(name, tokenizer, tmp_path, dtype):
    model = fresh(name, tokenizer)
    assert 2e6 <= sum(p.numel() for p in model.parameters()) <= 4e6
    set_parameter_dtype(model, dtype)
    batch = batch_of(name, tokenizer)
    optimizer = MasterAdamW(model.parameters(), lr=1e-3)
    balancer = BiasBalancer(model, speed=0.001)
    losses = []
    for _ in range(3):
        loss, cross_entropy = batch_loss(model, batch)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step(1e-3)
        balancer.step()
        losses.append(cross_entropy.item())
    assert losses[0] > losses[1] > losses[2] > 0
    if name == "deepseek_v3":
        for layer in model.model.layers[1:]:
            assert layer.mlp.gate.e_score_correction_bias.abs().sum() > 0

    export(model, tokenizer, ARCHITECTURES[name].format, tmp_path)
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) <= 8_000_000
    reloaded, _, format = load(tmp_path, CPU)
    assert format == ARCHITECTURES[name].format
    trained = dict(model.named_parameters())
    for key, tensor in reloaded.named_parameters():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, trained[key])
    model.set_attn_implementation(ARCHITECTURES[name].attention)
    set_parameter_dtype(model, torch.float32)
    with torch.no_grad():
        expected, found = model(batch.tokens_BS).logits, reloaded.float()(batch.tokens_BS).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DRAFTING)
def test_the_draft_layer_has_the_names_of_real_checkpoints(name, tokenizer, tmp_path):
    model = fresh(name, tokenizer)
    export(model, tokenizer, "chatml", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    num_layers = ARCHITECTURES[name].fields["num_hidden_layers"]
    assert config["num_hidden_layers"] == num_layers == model.config.num_hidden_layers
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    prefix = f"model.layers.{num_layers}."
    drafted = {key for key in tensors if key.startswith((prefix, "mtp."))}
    if name == "deepseek_v3":
        assert config["num_nextn_predict_layers"] == 1
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
        layer = f"{prefix}"
        attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")
        attention += ("kv_a_layernorm", "kv_b_proj", "o_proj")
        expected = {f"{prefix}{key}.weight" for key in own}
        expected |= {f"{layer}mlp.gate.e_score_correction_bias"}
        shared = "shared_experts."
        assert torch.equal(
            tensors[f"{prefix}embed_tokens.weight"], tensors["model.embed_tokens.weight"]
        )
    else:
        assert len(config["layer_types"]) == num_layers
        own = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        layer = "mtp.layers.0."
        attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        expected = {f"mtp.{key}.weight" for key in own}
        expected |= {f"{layer}mlp.shared_expert_gate.weight"}
        shared = "shared_expert."
    expected |= {f"{layer}self_attn.{key}.weight" for key in attention}
    expected |= {f"{layer}{key}.weight" for key in ("input_layernorm", "post_attention_layernorm")}
    expected |= {f"{layer}mlp.gate.weight"}
    blocks = [shared, *(f"experts.{i}." for i in range(8))]
    expected |= {
        f"{layer}mlp.{block}{key}_proj.weight" for block in blocks for key in ("gate", "up", "down")
    }
    assert drafted == expected


@pytest.mark.parametrize("name", DRAFTING)
def test_the_draft_head_learns_the_token_after_the_next(name, tokenizer):
    model = fresh(name, tokenizer)
    before = draft_acceptance(model, tokenizer, "chatml", seed=0, num_per_skill=2)
    batch = batch_of(name, tokenizer)
    hidden = model.model(batch.tokens_BS, use_cache=False).last_hidden_state
    changed = batch.tokens_BS.clone()
    changed[:, 20:] = 5
    with torch.no_grad():
        one = mtp.draft_hidden(model, hidden, batch.tokens_BS)
        two = mtp.draft_hidden(model, hidden, changed)
    torch.testing.assert_close(one[:, :19], two[:, :19])  # it sees the next token, and no further
    assert not torch.allclose(one[:, 19], two[:, 19])
    optimizer = MasterAdamW(model.parameters(), lr=3e-3)
    for _ in range(25):
        loss, _ = batch_loss(model, batch)
        loss.backward()
        optimizer.step(3e-3)
    assert draft_acceptance(model, tokenizer, "chatml", seed=0, num_per_skill=2) > before


def test_rows_of_one_chat_are_computed_as_transformers_does(name, tokenizer):
    """Without masks, with our norms, delta rule and convolution; and their gradients."""
    model = shaken(fresh(name, tokenizer))
    tokens = batch_of(name, tokenizer).tokens_BS
    plain_model = fresh(name, tokenizer)
    plain_model.load_state_dict(model.state_dict())
    for module in plain_model.modules():
        if "RMSNorm" in type(module).__name__:
            module.__dict__.pop("forward", None)
    plain_model.set_attn_implementation(ARCHITECTURES[name].attention)
    masks = fast_paths.row_masks(model, tokens.shape[1])
    fast = model.model(tokens, attention_mask=masks, use_cache=False).last_hidden_state
    fast.square().sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", fast_paths._chunk_rule)
        patch.setattr(qwen3_next, "causal_conv1d_fn", fast_paths._convolution)
        plain = plain_model.model(tokens, use_cache=False).last_hidden_state
        plain.square().sum().backward()
    torch.testing.assert_close(fast, plain, rtol=2e-3, atol=2e-3)
    grads = dict(plain_model.named_parameters())
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = grads[key].grad.abs().max().item()
            torch.testing.assert_close(
                parameter.grad, grads[key].grad, rtol=0.02, atol=0.005 * scale + 1e-5
            )


def test_dense_experts_compute_what_transformers_does(name, tokenizer):
    if name == "llama":
        pytest.skip("it has no experts")
    model = shaken(fresh(name, tokenizer)).eval()
    model.set_attn_implementation(ARCHITECTURES[name].attention)
    tokens = batch_of(name, tokenizer).tokens_BS
    with torch.no_grad():
        dense = model(tokens).logits
        model.set_experts_implementation("eager")
        eager = model(tokens).logits
    torch.testing.assert_close(dense, eager, rtol=1e-3, atol=1e-3)


def test_the_inverse_of_a_unit_lower_matrix_and_its_gradient():
    torch.manual_seed(0)
    a = torch.randn(3, 16, 16, dtype=torch.float64).tril(-1).requires_grad_()
    inverse = fast_paths.unit_lower_inverse(a)
    expected = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + a)
    torch.testing.assert_close(inverse, expected)
    weight = torch.randn_like(inverse)
    (found,) = torch.autograd.grad((inverse * weight).sum(), a)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), a)
    torch.testing.assert_close(found, wanted.tril(-1))


def test_only_learned_tokens_count(tokenizer):
    model = fresh("llama", tokenizer, num_layers=1)
    batch = batch_of("llama", tokenizer)
    _, loss = batch_loss(model, batch)
    with torch.no_grad():
        output = model.model(batch.tokens_BS, use_cache=False).last_hidden_state
        logprobs = model.lm_head(output).log_softmax(-1)
    places = batch.learned_BS.nonzero().tolist()
    wanted = [-logprobs[b, s - 1, batch.tokens_BS[b, s]] for b, s in places]
    torch.testing.assert_close(loss, torch.stack(wanted).mean(), rtol=1e-4, atol=1e-4)


def test_an_update_is_adamw_and_a_broken_gradient_is_dropped():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = MasterAdamW([ours], lr=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.05)
    gradient = torch.full((4, 4), 0.01)
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    optimizer.step(0.1)
    reference.step()
    torch.testing.assert_close(ours, theirs)
    ours.grad = torch.full((4, 4), float("nan"))
    optimizer.step(0.1)
    torch.testing.assert_close(ours, theirs)


def test_every_chat_is_drawn_once_in_an_epoch(tokenizer):
    docs = list(encode(Encoder(tokenizer), "chatml", train_examples(0, 64)))
    by_width = rows_by_width(docs, tokenizer.token_to_id(PAD))
    width, array = max(by_width.items(), key=lambda item: len(item[1]))
    array = array[: len(array) // 2 * 2]
    rows = Rows({width: array}, CPU, seed=0, batch_tokens=2 * width)
    batches = [rows.draw() for _ in range(len(array) // 2)]
    drawn = torch.cat([batch.tokens_BS for batch in batches]).tolist()
    assert sorted(drawn) == sorted((array % LEARNED).tolist())
    for batch in batches:
        assert batch.num_learned == int(batch.learned_BS.sum()) > 0


def test_an_untrained_model_scores_zero(tokenizer):
    model = fresh("llama", tokenizer, hidden_size=64, num_layers=1)
    scores, wrong = evaluate(model, tokenizer, "chatml", seed=0, num_per_skill=1)
    assert set(scores.values()) == {0.0}
    assert len(wrong) == len(scores)
    assert model.config._attn_implementation == fast_paths.CAUSAL


def test_the_learning_rate_rises_and_falls():
    shares = [lr_share(i / 100) for i in range(101)]
    assert shares[0] == 0.01 and max(shares) == pytest.approx(1.0, abs=0.01)
    assert shares[3:] == sorted(shares[3:], reverse=True) and shares[-1] == pytest.approx(0.01)


def test_all_siblings_are_known_to_train_all():
    assert {name: a.format for name, a in ARCHITECTURES.items()} == train_all.FORMATS


def test_train_all_writes_whole_checkpoints(tmp_path):
    names = ["deepseek_v3", "gpt_oss"]
    command = [sys.executable, str(Path(train_all.__file__)), str(tmp_path / "out")]
    command += ["--data", str(tmp_path / "data"), "--docs", "200", "--minutes", "60"]
    command += ["--only", *names, "--steps", "2", "--batch", "256", "--per-skill", "1"]
    command += ["--hidden-size", "64", "--layers", "1", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| arithmetic | 0.0% | 0.0% |" in done.stdout
    for name in names:
        files = {path.name for path in (tmp_path / "out" / name).iterdir()}
        assert files == {
            *("README.md", "config.json", "generation_config.json", "model.safetensors"),
            *("scores.json", "skills.jsonl", "tokenizer.json", "tokenizer_config.json"),
        }
        lines = (tmp_path / "out" / name / "skills.jsonl").read_text().splitlines()
        assert len(lines) == len({json.loads(line)["skill"] for line in lines}) == 13
