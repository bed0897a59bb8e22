"""A GPT from a file of its own (`gpt.py`, unchanged) on the source of Python's standard library, byte by byte."""

import math
import sysconfig
from pathlib import Path

import numpy as np
from gpt import GPT, GPTConfig

from scaleray import TokenSource, Workload


class NanoGPT(Workload):
    def __init__(self, n_layer=4, n_head=4, n_embd=128, block_size=128):
        self.config = GPTConfig(block_size, vocab_size=256, n_layer=n_layer, n_head=n_head, n_embd=n_embd)

    def build_model(self):
        return GPT(self.config)

    def datasets(self):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = np.frombuffer(b"\0".join(path.read_bytes() for path in files), dtype=np.uint8)
        cut = int(0.97 * len(text))
        return {
            name: TokenSource(part, sequence_length=self.config.block_size)
            for name, part in (("train", text[:cut]), ("val", text[cut:]))
        }

    def loss(self, model, batch):
        tokens = batch["tokens"].long()
        _, mean = model(tokens[:, :-1], tokens[:, 1:])  # the model gives a mean; scaleray adds up sums and counts
        count = tokens[:, 1:].numel()
        return mean * count, count

    def metrics(self, model, batch):
        total, count = self.loss(model, batch)
        return {"loss": (total, count), "bits_per_byte": (total / math.log(2), count)}

    def optimizer(self, model, settings):
        device = next(model.parameters()).device.type
        return model.configure_optimizers(settings.weight_decay, settings.learning_rate, settings.betas, device)
