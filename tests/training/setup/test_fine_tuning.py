"""Training from existing weights: a folder in Hugging Face's layout, adapters, frozen parts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from small_runs import (
    Classify,
    RankContext,
    Tokens,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scaleray.checkpoints.catalog import Catalog
from scaleray.config.averaging_pruning_fine_tuning import FineTuningSettings
from scaleray.errors import CheckpointError, ConfigError, WorkloadError
from scaleray.strategies.contract.parallel import full
from scaleray.training.setup import fine_tuning
from scaleray.training.setup.model_setup import prepare

sys.path.insert(0, str(Path(__file__).parents[3] / "jobs"))

import llama_folder
from language_model import LanguageModel
from transformer import Transformer, TransformerConfig

SHAPE = {"vocab_size": 17, "width": 24, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_width": 40, "rope_base": 500.0, "max_sequence_length": 16}  # fmt: skip


# a Llama in as few lines as possible, written from the paper and modeling_llama.py, sharing nothing with jobs/transformer.py


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotate_half(x, base):
    length, width = x.shape[-2:]
    inverse = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.cat((inverse, inverse))[None]
    turned = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return x * angles.cos() + turned * angles.sin()


def llama(weights, config, tokens):
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    x = weights["model.embed_tokens.weight"][tokens]
    batch, length, _ = x.shape
    mask = torch.full((length, length), -math.inf).triu(1)
    for n in range(config["num_hidden_layers"]):
        w = {k.removeprefix(f"model.layers.{n}."): v for k, v in weights.items() if k.startswith(f"model.layers.{n}.")}
        h = rms_norm(x, w["input_layernorm.weight"])
        q, k, v = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).view(batch, length, -1, width).transpose(1, 2) for name in "qkv"
        )
        q, k = rotate_half(q, config["rope_theta"]), rotate_half(k, config["rope_theta"])
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width) + mask, dim=-1) @ v
        x = x + mixed.transpose(1, 2).reshape(batch, length, -1) @ w["self_attn.o_proj.weight"].T
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    x = rms_norm(x, weights["model.norm.weight"])
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def make_folder(folder, *, tied, dtype=torch.float32, files=1, **changes):
    """A folder as transformers writes it, of random weights; names and shapes are spelled out, not taken from the job."""
    config = {
        "model_type": "llama",
        "vocab_size": 17,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        **changes,
    }
    shapes = {"model.embed_tokens.weight": (17, 24), "model.norm.weight": (24,)}
    for n in range(2):
        for name, shape in {
            "input_layernorm": (24,),
            "post_attention_layernorm": (24,),
            "self_attn.q_proj": (24, 24),
            "self_attn.k_proj": (12, 24),
            "self_attn.v_proj": (12, 24),
            "self_attn.o_proj": (24, 24),
            "mlp.gate_proj": (40, 24),
            "mlp.up_proj": (40, 24),
            "mlp.down_proj": (24, 40),
        }.items():
            shapes[f"model.layers.{n}.{name}.weight"] = shape
    if not tied:
        shapes["lm_head.weight"] = (17, 24)
    draw = torch.Generator().manual_seed(7)
    weights = {name: (torch.randn(shape, generator=draw) / 3).to(dtype) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return config, weights
    names, where = sorted(weights), {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({n: weights[n] for n in names[number::files]}, folder / name)
        where |= dict.fromkeys(names[number::files], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return config, weights


class Llama(Tokens):
    """The reference transformer on a few tokens."""

    length, vocabulary = 7, 17

    def __init__(self, num_rows=26, tie_head=True):
        super().__init__(num_rows)
        self.config = TransformerConfig(**SHAPE, tie_head=tie_head)

    def build_model(self):
        model = Transformer(self.config)
        model.init_weights()
        return model

    def weight_names(self, model, config):
        return llama_folder.weight_names(self.config, config)


TOKENS = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_folder_computes_what_llama_computes(tmp_path, tied, files, dtype):
    config, weights = make_folder(tmp_path / "llama", tied=tied, files=files, dtype=dtype)
    workload = Llama(tie_head=tied)
    model = workload.build_model()
    fine_tuning.load(model, workload, str(tmp_path / "llama"))
    expected = llama({name: w.float() for name, w in weights.items()}, config, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    assert model.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_is_read_back_and_is_llama(tmp_path, tied):
    workload = Llama(tie_head=tied)
    with same_generators():
        model = workload.build_model()
    llama_folder.export(model, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), llama(weights, config, TOKENS), rtol=1e-4, atol=1e-5)
    other = Llama(tie_head=tied).build_model()
    fine_tuning.load(other, workload, str(tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_language_model_takes_a_folder_of_its_own_shape_and_names_what_differs(tmp_path):
    workload = LanguageModel(width=32, num_blocks=2, num_heads=2, sequence_length=16)
    model, other = workload.build_model(), workload.build_model()
    llama_folder.export(model, tmp_path / "bytes")
    fine_tuning.load(other, workload, str(tmp_path / "bytes"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    make_folder(tmp_path / "words", tied=True)
    with pytest.raises(WorkloadError, match=r"head_dim|hidden_size|vocab_size"):
        fine_tuning.load(other, workload, str(tmp_path / "words"))


def loaded_in_shards(place, folder):
    workload = Llama(tie_head=False)
    model = workload.build_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (place.world_size,)))
    fine_tuning.load(model, workload, folder)
    return {name: full(value.detach()).clone() for name, value in model.state_dict().items()}


@pytest.mark.combination
def test_each_rank_reads_its_shards(gloo, tmp_path):
    _, weights = make_folder(tmp_path / "llama", tied=False, files=2)
    for state in gloo.run(4, loaded_in_shards, str(tmp_path / "llama")):
        assert torch.equal(state["embedding.weight"], weights["model.embed_tokens.weight"])
        assert torch.equal(state["blocks.1.feed_forward.down.weight"], weights["model.layers.1.mlp.down_proj.weight"])
        assert torch.equal(state["head.weight"], weights["lm_head.weight"])


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_starts_from_a_folder_on_any_number_of_workers(gloo, tmp_path, strategy):
    config, weights = make_folder(tmp_path / "llama", tied=True)
    flags = {"workload.weights": str(tmp_path / "llama"), "optimizer.learning_rate": 0.01}
    alone = train_alone(Llama(), flags)
    finished = gloo.run(2, train, Llama(), {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9
    # the first loss is that of the folder's weights
    job, sources = make_job(Llama(), flags)
    batch = {n: torch.from_numpy(v) for n, v in sources["train"].read(job.train_plan().global_indices(0)).items()}
    wide = {name: w.double() for name, w in weights.items()}
    total, count = job.workload.loss(lambda tokens: llama(wide, config, tokens), batch)
    assert alone.losses[0] == pytest.approx((total / count).item(), rel=1e-6)


# what does not fit


def change(folder, name, value):
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    if value is not None:
        weights[name] = value
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            torch.zeros(41, 24),
            r"blocks\.1\.feed_forward\.up\.weight is \[40, 24\]",
        ),
        ("model.norm.weight", None, r"norm\.weight is \[24\] float32: .* has no such tensor"),
        (
            "model.layers.2.mlp.up_proj.weight",
            torch.zeros(40, 24),
            r"model\.layers\.2\.mlp\.up_proj\.weight is missing",
        ),
        ("model.norm.weight", torch.zeros(24, dtype=torch.float64), "wider dtype"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_changed(tmp_path, name, value, words):
    make_folder(tmp_path / "llama", tied=True)
    change(tmp_path / "llama", name, value)
    model = Llama().build_model()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        fine_tuning.load(model, Llama(), str(tmp_path / "llama"))
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 10_000.0), ("rms_norm_eps", 1e-6), ("hidden_act", "gelu"), ("attention_bias", True), ("num_key_value_heads", 4),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), ("max_position_embeddings", 8), ("tie_word_embeddings", False),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 500.0}),
    ],
)  # fmt: skip
def test_a_config_that_means_another_model_is_refused(tmp_path, key, value):
    make_folder(tmp_path / "llama", tied=True, **{key: value})
    with pytest.raises(WorkloadError, match=key if key != "rope_parameters" else "rope_scaling"):
        fine_tuning.load(Llama().build_model(), Llama(), str(tmp_path / "llama"))


def test_rotations_of_a_newer_config_and_tables_of_an_old_folder_are_understood(tmp_path):
    make_folder(tmp_path / "llama", tied=True)
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    path.write_text(json.dumps(config))
    change(tmp_path / "llama", "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(3))
    change(tmp_path / "llama", "lm_head.weight", torch.zeros(17, 24))  # tied: the embedding counts
    model = Llama().build_model()
    fine_tuning.load(model, Llama(), str(tmp_path / "llama"))
    assert model.head.weight.any()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not readable"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), r"model\.safetensors is not readable"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'), "weight_map"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'), "a in .* is missing"),
    ],
)  # fmt: skip
def test_a_spoilt_folder_is_refused(tmp_path, spoil, words):
    make_folder(tmp_path / "llama", tied=True)
    spoil(tmp_path / "llama")
    with pytest.raises(CheckpointError, match=words):
        fine_tuning.load(Llama().build_model(), Llama(), str(tmp_path / "llama"))


def test_a_workload_without_a_mapping_takes_its_own_names(tmp_path):
    model = Classify().build_model()
    (tmp_path / "config.json").write_text("{}")
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    other = Classify().build_model()
    fine_tuning.load(other, Classify(), str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# adapters

LORA = {"fine_tuning.lora_rank": 3, "fine_tuning.lora_alpha": 6.0, "fine_tuning.lora_layers": ["query", "down"], "optimizer.learning_rate": 0.05}  # fmt: skip
SETTINGS = FineTuningSettings(lora_rank=3, lora_alpha=6.0, lora_layers=("query", "down"))


def test_adapters_start_as_the_base_and_train_alone():
    with same_generators():
        model = Llama().build_model()
        before = model(TOKENS)
        names = set(model.state_dict())
        fine_tuning.adapt(model, SETTINGS)
    assert torch.equal(model(TOKENS), before)
    added = set(model.state_dict()) - names
    assert names < set(model.state_dict())
    assert added == {
        f"blocks.{n}.{layer}.{part}"
        for n in (0, 1)
        for layer in ("attention.query", "feed_forward.down")
        for part in ("lora_a", "lora_b")
    }
    assert {name for name, p in model.named_parameters() if p.requires_grad} == added


def test_an_adapter_adds_alpha_over_rank_times_b_a():
    layer = nn.Linear(5, 4).double()
    fine_tuning.LoraLinear.adapt(layer, rank=2, alpha=6.0)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = F.linear(x, layer.weight + 3.0 * layer.lora_b @ layer.lora_a, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-13)
    state = {f"top.{name}": value.detach() for name, value in layer.state_dict().items()}
    plain = fine_tuning.merged(state, FineTuningSettings(lora_rank=2, lora_alpha=6.0))
    assert plain.keys() == {"top.weight", "top.bias"}
    torch.testing.assert_close(F.linear(x, plain["top.weight"], plain["top.bias"]), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_train_the_same_on_any_number_of_workers_and_merge(gloo, tmp_path, strategy):
    make_folder(tmp_path / "llama", tied=True)
    flags = {**LORA, "workload.weights": str(tmp_path / "llama"), "optimizer.name": "adamw"}
    alone = train_alone(Llama(), flags)
    apart = train_alone(Llama(), {**flags, "fine_tuning.merge": False})
    finished = gloo.run(2, train, Llama(), {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9
    assert alone.losses[-1] < alone.losses[0]
    # merged: a plain model computes what the adapted one does
    plain, adapted = Llama().build_model().double(), Llama().build_model().double()
    plain.load_state_dict(alone.weights)
    fine_tuning.adapt(adapted, SETTINGS)
    adapted.load_state_dict(apart.weights)
    torch.testing.assert_close(plain(TOKENS), adapted(TOKENS), rtol=1e-12, atol=1e-12)
    # and the base is the folder's, untouched
    start = Llama().build_model()
    fine_tuning.load(start, Llama(), str(tmp_path / "llama"))
    for name, value in start.double().state_dict().items():
        assert torch.equal(value, apart.weights[name]), name
    assert apart.weights["blocks.0.attention.query.lora_b"].any()


@pytest.mark.combination
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_module_trained_whole_is_the_same_on_any_number_of_workers(gloo, strategy):
    flags = {**LORA, "fine_tuning.trained_whole": ["norm"], "optimizer.name": "adamw"}
    alone, frozen = train_alone(Llama(), flags), train_alone(Llama(), {**flags, "fine_tuning.trained_whole": []})
    finished = gloo.run(2, train, Llama(), {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9
    moved = {n for n, value in alone.weights.items() if not torch.equal(value, frozen.weights[n]) and "norm" in n}
    assert moved == {"norm.weight"}


def killed(place, flags, folder, kill_at):
    finished = train(place, Llama(num_rows=40), flags, folder=folder, kill_at=kill_at)
    return finished


@pytest.mark.combination
def test_adapters_resume_and_a_checkpoint_writes_the_base_once(gloo, tmp_path):
    flags = {
        **LORA,
        "strategy.name": "fsdp",
        "checkpoint.every": "2 steps",
        "deterministic": True,
        "optimizer.name": "adamw",
    }
    whole = gloo.run(2, killed, flags, None, None)[0]
    first = gloo.run(2, killed, flags, str(tmp_path / "run"), 5)[0]
    resumed = gloo.run(2, killed, flags, str(tmp_path / "run"), None)[0]
    assert resumed.losses == whole.losses[4:]
    assert largest_difference(whole.weights, resumed.weights) == 0
    sizes = [record.bytes_written for record in first.checkpoints]
    assert sizes[1] < 0.5 * sizes[0]  # the adapters, their optimizer's state and little else
    # a training with adapters starts from a checkpoint that has them
    again = train_alone(Llama(), {**LORA, "workload.weights": str(tmp_path / "run"), "stop.after": "1 steps"})
    fresh = train_alone(Llama(), {**LORA, "stop.after": "1 steps"})
    assert again.losses != fresh.losses
    with pytest.raises(CheckpointError, match="lora_a is missing"):
        train_alone(Llama(), {"workload.weights": str(tmp_path / "run")})


def test_the_checkpoint_keeps_adapters_apart(tmp_path):
    train_alone(Llama(), {**LORA, "checkpoint.every": "2 steps"}, folder=tmp_path)
    names = Catalog.of_run(str(tmp_path)).newest().tensors
    assert "model.blocks.0.attention.query.lora_a" in names and "model.blocks.0.attention.query.weight" in names


# frozen parts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_parts_stay_and_the_others_train(gloo, strategy):
    flags = {"fine_tuning.freeze": ["embedding", "blocks.0."], "strategy.name": strategy}
    finished = gloo.run(2, train, Llama(), flags)[0]
    alone = train_alone(Llama(), {**flags, "strategy.name": "auto"})
    assert largest_difference(alone.weights, finished.weights) < 1e-9
    with same_generators():
        job, _ = make_job(Llama(), flags)
        start = prepare(job.workload, job.config, job.recipe, RankContext()).parallel.module.state_dict()
    for name, value in start.items():
        is_frozen = name.startswith(("embedding", "blocks.0.", "head"))  # the head is the embedding
        assert torch.equal(finished.weights[name], value) == is_frozen, name


def test_a_tied_parameter_is_frozen_under_either_name():
    model = Llama().build_model()
    fine_tuning.adapt(model, FineTuningSettings(freeze=("head",)))
    assert not model.embedding.weight.requires_grad and model.norm.weight.requires_grad


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"freeze": ("embeding",)}, "embeding.*blocks, embedding, head, norm"),
        ({"freeze": ("",)}, "nothing is left"),
        ({"lora_rank": 2, "trained_whole": ("head_2",)}, "head_2.*blocks, embedding, head, norm"),
        ({"lora_rank": 2, "lora_layers": ("q_proj",)}, "q_proj.*down, gate, head, key, output, query, up, value"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(settings, words):
    with pytest.raises(WorkloadError, match=f"(?s){words}"):
        fine_tuning.adapt(Llama().build_model(), FineTuningSettings(**settings))


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"fine_tuning.lora_alpha": 3.0}, "fine_tuning.lora_alpha"),
        ({"fine_tuning.merge": False}, "fine_tuning.merge"),
        ({"fine_tuning.trained_whole": ["head"]}, "fine_tuning.trained_whole"),
        ({"fine_tuning.lora_rank": 2, "fine_tuning.freeze": ["a"]}, "fine_tuning.freeze"),
        ({"fine_tuning.lora_rank": 2, "fine_tuning.lora_layers": []}, "fine_tuning.lora_layers"),
        ({"fine_tuning.lora_rank": 2, "strategy.name": "tensor", "scale.workers": 2}, "fine_tuning.lora_rank"),
    ],
)
def test_settings_without_effect_are_refused(flags, key):
    with pytest.raises(ConfigError) as raised:
        make_job(Classify(), flags)
    assert raised.value.key == key
