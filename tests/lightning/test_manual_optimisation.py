"""Manual optimisation: what a plain loop and Lightning's own Trainer train, on one worker and on several."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from lit_modules import FLAGS, NUM_FEATURES, Data, Plain, farthest, with_lightning, with_scaleray
from small_runs import largest_difference, make_job, same_generators, train
from torch import nn

import scaleray
from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.errors import ScaleRayError
from scaleray.lightning import as_workload
from scaleray.records.run_record import LoggedMetrics

ROUNDING = 1e-12
LATENT = 3
FLAGS_OF_TWO = {**FLAGS, "optimizer.name": "adamw"}


class Gan(Plain):
    """The GAN of Lightning's documentation: `generator, discriminator = self.optimizers()`, the discriminator first."""

    def __init__(self, lr=0.02):
        super().__init__()
        self.automatic_optimization = False
        del self.net
        self.G = nn.Sequential(nn.Linear(LATENT, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_FEATURES))
        self.D = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def noise(self, x):
        return torch.randn(len(x), LATENT, dtype=x.dtype)

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        x, _ = batch
        real, fake = torch.ones(len(x), 1).to(x) * 0.9, torch.zeros(len(x), 1).to(x)
        drawn = self.G(self.noise(x))
        right = self.D(x)
        d_loss = F.binary_cross_entropy_with_logits(right, real)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.D(drawn.detach()), fake)
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        g_loss = F.binary_cross_entropy_with_logits(self.D(drawn), real)
        g_loss = g_loss + 0.1 * (right.detach() - self.D(x)).square().mean()  # judged before and after the step
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss, "right": right.mean()}, prog_bar=True, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_right", self.D(batch[0]).mean())

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.G.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9))
        return g_opt, torch.optim.Adam(self.D.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9))


class Without(Gan):
    """Noise and normalisation that do not depend on how a batch is cut."""

    def __init__(self, lr=0.02):
        super().__init__(lr)
        self.G[1] = nn.Identity()

    def noise(self, x):
        return x[:, :LATENT].flip(1)


class Toggled(Without):
    """The other order, as in Lightning's example of a GAN, with clipping, schedulers and context managers."""

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        x, _ = batch
        ones, zeros = torch.ones(len(x), 1).to(x), torch.zeros(len(x), 1).to(x)
        self.toggle_optimizer(g_opt)
        g_loss = F.binary_cross_entropy_with_logits(self.D(self.G(self.noise(x))), ones)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(g_opt, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        g_opt.step()
        self.untoggle_optimizer(g_opt)
        with self.toggled_optimizer(d_opt):
            d_loss = F.binary_cross_entropy_with_logits(self.D(x), ones)
            d_loss = d_loss + F.binary_cross_entropy_with_logits(self.D(self.G(self.noise(x)).detach()), zeros)
            d_opt.zero_grad()
            self.manual_backward(d_loss)
            self.clip_gradients(d_opt, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            d_opt.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return list(optimizers), [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


class OfEpochs(Without):
    """One optimizer, and a scheduler that is stepped by a hook."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        loss = (self.D(self.G(self.noise(x))) - y[:, None]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


CLIPPED = {"optimizer.clip_norm": 0.05}


def in_a_plain_loop(module_class, workload):
    """The module after the same steps, with nothing but torch."""
    with same_generators():
        job, sources = make_job(workload, FLAGS)
        plan = job.train_plan()
        seed_everything(stream_seed(job.config.seed, "model"))
        module = module_class().double()
        seed_everything(stream_seed(job.config.seed, "dropout", 0))
        g_opt, d_opt = module.configure_optimizers()
        module.optimizers = lambda: (g_opt, d_opt)
        module.manual_backward = lambda loss: loss.backward()
        logged = []
        module.log_dict = lambda values, **_: logged.append(
            {name: float(value.detach()) for name, value in values.items()}
        )
        for step in range(job.recipe.total_steps):
            columns = sources["train"].read(plan.global_indices(step))
            x, y = (torch.from_numpy(values) for values in columns.values())
            module.training_step([x.double(), y], step)
    return module, logged


def test_a_gan_with_noise_and_batchnorm_trains_as_a_plain_loop_does():
    workload = as_workload(Gan, Data, count="rows")()
    ours = with_scaleray(workload)
    theirs, logged = in_a_plain_loop(Gan, workload)
    assert farthest(ours.weights, theirs) < ROUNDING
    for name in ("g_loss", "d_loss", "right"):
        assert [step.more[f"train/{name}"] for step in ours.steps] == pytest.approx([v[name] for v in logged])
    assert ours.steps[3].losses == pytest.approx(
        {"optimizer_0": logged[3]["g_loss"], "optimizer_1": logged[3]["d_loss"]}
    )


@pytest.mark.parametrize(
    ("module", "flags", "optimizers"),
    [(Without, {}, 2), (Toggled, CLIPPED, 2), (OfEpochs, {"evaluation.every": "1 epoch"}, 1)],
)
def test_twenty_steps_are_those_of_lightnings_own_trainer(module, flags, optimizers):
    workload = as_workload(module, Data)()
    ours = with_scaleray(workload, flags)
    theirs, trainer = with_lightning(module, workload, flags, optimizers=optimizers)
    assert farthest(ours.weights, theirs) < ROUNDING
    assert trainer.global_step == optimizers * len(ours.steps) == optimizers * 20
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    last = {Toggled: 0.9, OfEpochs: 0.5}.get(module, 1.0)  # factor of the scheduler's step after the last one
    assert ours.steps[-1].learning_rate * last == pytest.approx(rates[0])


def trained(place, module, flags, folder=None, kill_at=None):
    workload = as_workload(module, Data)()
    finished = train(place, workload, {**FLAGS, **flags}, folder=folder, kill_at=kill_at)
    logged = {
        (m.step, name): value
        for m in finished.messages
        if isinstance(m, LoggedMetrics)
        for name, value in m.metrics.items()
    }
    return finished.weights, finished.losses, logged


@pytest.mark.always("ddp-Without", "ddp-Toggled", "fsdp-OfEpochs")
@pytest.mark.parametrize(
    ("strategy", "module"),
    [("ddp", Without), ("ddp", Toggled), ("zero1", Without), ("zero1", Toggled), ("fsdp", OfEpochs)],
)
def test_two_workers_with_micro_batches_train_what_one_does(gloo, strategy, module):
    flags = CLIPPED if module is Toggled else {}
    alone = with_scaleray(as_workload(module, Data)(), flags)
    (weights, losses, logged), *_ = gloo.run(
        2, trained, module, {**flags, "strategy.name": strategy, "batch.micro_size": 2}
    )
    assert all(torch.allclose(weights[name], alone.weights[name], rtol=1e-9, atol=1e-12) for name in weights)
    assert losses == pytest.approx(alone.losses, rel=1e-9)
    means = {(m.step, n): v for m in alone.messages if isinstance(m, LoggedMetrics) for n, v in m.metrics.items()}
    assert logged == pytest.approx(means, rel=1e-9)
    assert module is not Without or (16, "train/right_epoch") in logged


def test_several_optimizers_over_split_parameters_are_refused(gloo):
    with pytest.raises(ScaleRayError, match="manual optimisation with several optimizers needs whole parameters"):
        gloo.run(2, trained, Without, {"strategy.name": "fsdp"})


@pytest.mark.combination
def test_an_interrupted_training_goes_on_to_the_bit(gloo, tmp_path):
    flags = {**CLIPPED, "checkpoint.every": "5 steps", "deterministic": True}
    (weights, _, _), *_ = gloo.run(2, trained, Toggled, flags, tmp_path / "whole")
    gloo.run(2, trained, Toggled, flags, tmp_path / "run", 12)
    (again, _, _), *_ = gloo.run(2, trained, Toggled, flags, tmp_path / "run")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def step_of(body):
    """A module with two optimizers whose training_step does this."""

    class Own(Without):
        def training_step(self, batch, batch_idx):
            x, _ = batch
            body(self, *self.optimizers(), self.D(self.G(self.noise(x))).square().mean(), batch_idx)

    return Own


def one(module, optimizer, loss):
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def every_other(self, g, d, loss, batch_idx):
    one(self, g, loss)
    if batch_idx % 2:
        one(self, d, loss)


def twice(self, g, d, loss, batch_idx):
    for _ in range(2):
        one(self, d, loss)
    one(self, g, loss)


def shared(self, g, d, loss, batch_idx):
    g.zero_grad()
    d.zero_grad()
    self.manual_backward(loss)
    g.step()
    d.step()


def never_zeroed(self, g, d, loss, batch_idx):
    one(self, g, loss)
    self.manual_backward(loss)
    d.step()


def with_a_closure(self, g, d, loss, batch_idx):
    g.step(lambda: loss)


def clipped_otherwise(self, g, d, loss, batch_idx):
    self.clip_gradients(g, 0.5)


def after_the_last(self, g, d, loss, batch_idx):
    one(self, g, loss)
    one(self, d, loss)
    self.log("after", self.D[0].weight.norm())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (every_other, "takes 0 steps of optimizer 1.*batch.global_size"),
        (twice, "takes 2 steps of optimizer 1.*losses()"),
        (shared, "takes a step without a manual_backward of its own"),
        (never_zeroed, r"does not call zero_grad\(\) of optimizer 1"),
        (with_a_closure, "a closure of optimizer.step"),
        (clipped_otherwise, "self.clip_gradients by norm of 0.5.*set it to that norm"),
        (after_the_last, "uses the model after its last step.*on_train_batch_end"),
    ],
)
def test_steps_that_cannot_be_taken_exactly_are_refused_at_the_first_batch(body, words):
    with pytest.raises(ScaleRayError, match=f"(?s){words}") as refusal:
        with_scaleray(as_workload(step_of(body), Data)())
    assert f"{__file__}:" in str(refusal.value) and "Traceback" not in str(refusal.value)


def test_a_refusal_shows_a_workload_that_trains_what_the_steps_mean():
    class Both(Without):
        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                one(self, optimizer, self.D(self.G(self.noise(batch[0]))).square().mean())

    with pytest.raises(ScaleRayError) as refusal:
        with_scaleray(as_workload(step_of(never_zeroed), Data)())
    lines = textwrap.dedent(str(refusal.value).partition("workloads.md):\n\n")[2])
    assert len(lines.splitlines()) < 25 and lines.count("Adam takes the step") == 2
    data = Data()
    data.setup("fit")
    lines = lines.replace('"train": ..., "val": ...', '"train": data.rows["train"]').replace("return Own()", "return module()")  # fmt: skip
    lines = lines.replace("loss = ...", "loss = model.D(model.G(model.noise(batch[0]))).square().mean()")
    names = {"scaleray": scaleray, "data": data, "module": Both}
    exec(lines, names)
    shown, expected = with_scaleray(names["Workload"]()), with_scaleray(as_workload(Both, Data)())
    assert largest_difference(shown.weights, expected.weights) < ROUNDING


def test_manual_optimisation_that_the_class_does_not_show_is_refused():
    def hide(module):
        module.automatic_optimization = False

    class Hidden(Plain):
        def __init__(self):
            super().__init__()
            hide(self)

    with pytest.raises(ScaleRayError, match="uses manual optimisation: scaleray detects it only in the module's own"):
        as_workload(Hidden, Data)().build_model()
