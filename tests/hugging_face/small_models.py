"""Small models of transformers, and workloads with them."""

from __future__ import annotations

import numpy as np
import torch

from scaleray.data import TRAIN
from scaleray.hugging_face import CausalLanguageModel, HuggingFaceWorkload, MaskedLanguageModel
from scaleray.hugging_face.token_rows import IGNORED

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"model_type": "bart", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}  # fmt: skip
IDS = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(3))
VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def causal(texts, model=LLAMA, **args):
    args = {"tokenizer": "bytes", "sequence_length": 16, **args}
    return CausalLanguageModel(model, data={"train": texts}, **args)


class Causal(HuggingFaceWorkload):
    auto_class, predicts_next = "AutoModelForCausalLM", True

    def datasets(self):
        ids = np.random.default_rng(0).integers(0, 50, (26, 12))
        is_left_out = np.random.default_rng(1).random(ids.shape) < 0.4
        is_left_out[:, 0] = True  # transformers counts it where it is not, although nothing predicts it
        return {TRAIN: {"input_ids": ids, "labels": np.where(is_left_out, IGNORED, ids)}}


def masked(texts):
    return MaskedLanguageModel(BERT, tokenizer="bytes", data={"train": texts}, sequence_length=16)


def built(workload, seed=0):
    torch.manual_seed(seed)
    return workload.build_model().eval()


def batch_of(source, rows=4, collate=lambda rows: {name: torch.from_numpy(values) for name, values in rows.items()}):
    return collate({name: values[:rows] for name, values in source.arrays.items()})
