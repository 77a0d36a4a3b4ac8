"""Real models are trained as in eager, for ten steps and more than one way."""

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import aotlab
from aotlab.maintenance.bench import courses, training
from aotlab.maintenance.bench.courses import (
    Course,
    Errors,
    Training,
    by_ours,
    by_stock,
    comparable,
    eagerly,
    errors_of_steps,
    train,
)
from aotlab.maintenance.bench.models import trained_models
from aotlab.maintenance.bench.sizes import as_near, varied

pytest.importorskip("transformers", reason="the models are those of transformers")
pytest.importorskip("torch_geometric", reason="the graph layers are those of torch_geometric")
pytest.importorskip("diffusers", reason="the diffusion model is of diffusers")

SMALL = ["--small", "--no-sizes", "--backend", "eager"]
MODELS = {trained.name: trained for trained in trained_models(small=True)}
#: Models whose capture by stock Dynamo, run by eager, rounds otherwise than they do: ours is compared with that.
ROUNDED_BY_DYNAMO = ("Llama", "Mixtral", "Qwen") if torch.__version__.startswith("2.11") else ()


@pytest.fixture(autouse=True)
def one_thread():
    """Take one thread: with several, eager's own convolutions are now and then rounded otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with comparable():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps(name, min_cut):
    """Ten steps on the eager backend are eager's bit for bit: losses, parameters, buffers."""
    expected = train(MODELS[name], eagerly)
    found = train(MODELS[name], partial(by_ours, backend="eager", min_cut=min_cut))
    if name in ROUNDED_BY_DYNAMO and not found.is_same(expected):
        torch.compiler.reset()
        alone = train(MODELS[name], partial(torch.compile, backend="eager"))
        assert alone.losses == pytest.approx(expected.losses, rel=1e-6)
        expected = alone
    assert found.losses == expected.losses
    assert found.is_same(expected)
    assert len(set(found.losses)) == 10  # it learns something


@pytest.mark.tier("full")  # slow, but what tells first that a release of transformers does something new
@pytest.mark.parametrize("name", ["Llama", "LSTM", "U-Net", "diffusion", "Mamba", "PINN", "MAML"])
def test_ten_steps_directly(name):
    """Models that do not read tensors' values are compiled by the direct frontend, in one graph."""
    made = []

    def directly(module):
        made.append(aotlab.compile(module, backend="eager", partitioner=aotlab.min_cut_rematerialization_partition))
        return made[-1]

    expected = train(MODELS[name], eagerly)
    found = train(MODELS[name], directly)
    assert found.losses == expected.losses
    assert found.is_same(expected)
    assert (made[0].compiled.calls.eager, len(made[0].compiled.entries)) == (0, 1)


def errors(name, wrap):
    """Compare ten steps of a model with float64's."""
    torch.compiler.reset()
    return errors_of_steps(MODELS[name], Training(MODELS[name], wrap, torch.device("cpu")))


@pytest.mark.parametrize("name", ["Llama", "U-Net"])
def test_on_inductor(name):
    """With Inductor, a step's distance from float64 is at most twice torch.compile's distance, or small enough.

    In a complete training, the loss of Llama is within the same bound. The losses of a U-Net drift, also in eager.
    """
    assert errors(name, by_ours).is_within(errors(name, by_stock))
    if name == "Llama":
        exact = train(MODELS[name], eagerly, dtype=torch.float64)
        assert train(MODELS[name], by_ours).drift(exact) <= max(11, 2 * train(MODELS[name], by_stock).drift(exact))


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_without_the_cache_of_keys(name):
    """The expanded keys and values, which nobody returns then, have the strides for which the backward is compiled."""
    trained = MODELS[name]
    model, batch = trained.model(), trained.batch(torch.Generator().manual_seed(1))
    model.config.use_cache = False
    gradients = []
    for wrap in (eagerly, partial(by_ours, min_cut=True)):
        torch.compiler.reset()
        model.zero_grad()
        trained.loss(wrap(model)(**batch)).backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_errors_of_steps():
    """Eager's own steps are as exact as float32 is; a gradient that is a little off, and a lost buffer, are seen."""

    def off(module):
        module.first[0].weight.register_hook(lambda gradient: gradient * 1.001)
        return module

    def forgetful(module):
        def call(**batch):
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            return torch.func.functional_call(module, buffers, kwargs=batch)

        return call

    fine = errors("U-Net", eagerly)
    for wrap, kind in ((off, "gradients"), (forgetful, "buffers")):
        found = errors("U-Net", wrap)
        assert not found.is_within(fine)
        assert getattr(found, kind) > 2 * getattr(fine, kind)


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_eager(name):
    """Each model runs in float64, too, draws the same numbers there, and its steps are as exact as float32 is."""
    found = errors(name, eagerly)
    assert found.loss < 1e-5  # transformers computes some losses in float32 whatever the model's, which may be equal
    assert 0 < found.gradients < 1e-4
    assert found.gradients <= found.largest_gradients
    assert found.buffers < 1e-5


def test_within():
    """Twice another's error is within the limit, and so is float32's own error. NaN is not."""
    stock = Errors(loss=1e-5, gradients=1e-3, buffers=0.0)
    assert Errors(loss=2e-5, gradients=2e-3, largest_gradients=1.0, buffers=1e-6).is_within(stock)
    for worse in ({"loss": 2.1e-5}, {"gradients": 2.1e-3}, {"buffers": 1.4e-6}, {"loss": math.inf}):
        assert not Errors(**worse).is_within(stock), worse
    one = courses.Computed(loss=torch.tensor(1.0), gradients=[torch.tensor([3.0, 4.0])], buffers=[])
    nan = courses.Computed(loss=torch.tensor(math.nan), gradients=[torch.tensor([3.0, 4.5])], buffers=[])
    assert nan.errors(one) == (math.inf, 0.1, 0.0)
    assert Errors(1.0, 2.0, 3.0, 4.0) | Errors(4.0, 3.0, 2.0, 1.0) == Errors(4.0, 3.0, 3.0, 4.0)


def test_what_differs_is_seen():
    """A course of another loss, or another parameter, is another."""
    one = Course(losses=(1.0, 2.0), state={"w": torch.ones(2)})
    assert one.is_same(Course(losses=(1.0, 2.0), state={"w": torch.ones(2)}))
    assert not one.is_same(Course(losses=(1.0, 2.5), state={"w": torch.ones(2)}))
    assert not one.is_same(Course(losses=(1.0, 2.0), state={"w": torch.tensor([1.0, 1.0 + 2**-20])}))
    drift = Course(losses=(1.0, 2.0 + 2**-20), state={}).drift(one)
    assert drift == pytest.approx(2**-21 / torch.finfo(torch.float32).eps)


def test_figures(tmp_path):
    """The command measures, prints and writes.

    With min-cut it holds less memory, and never more than eager.
    """
    out, path = io.StringIO(), tmp_path / "figures.json"
    assert training.main([*SMALL, "--only", "U-Net", "--json", str(path)], out=out) == 0
    (row,) = json.loads(path.read_text())["models"]
    assert row["same"] is True
    assert row["graphs"] >= 1
    assert row["eager_calls"] == 0
    assert row["our_min_cut_bytes"] < row["our_bytes"] <= row["eager_bytes"]
    assert row["step"] is None  # not measured on the eager backend
    assert "U-Net" in out.getvalue()
    assert "stock" not in training.table([training.ModelFigure(model="x", description="")]).dropna(axis=1, how="all")


def test_a_difference_is_a_problem(monkeypatch):
    """A model that is not trained as in eager is named, and the command fails."""
    monkeypatch.setattr(Course, "is_same", lambda self, other: False)
    out = io.StringIO()
    assert training.main([*SMALL, "--only", "U-Net"], out=out) == 1
    assert "U-Net: on the eager backend" in out.getvalue()


def test_a_failing_model_ends_nothing():
    """A model's error is given in its row, and the other models are still measured."""
    broken = training.Trained(name="broken", description="", model=lambda: torch.nn.Linear(1, 1), batch=lambda g: {})
    (row,) = training.measure([broken], torch.device("cpu"), inductor=False, rounds=1, say=lambda text: None)
    assert "TypeError" in row.problem
    assert math.isnan(row.eager_bytes)


def measured(name, **values):
    """Make a row."""
    return training.ModelFigure(model=name, description="", **values)


def test_markdown_and_resumed(tmp_path, monkeypatch):
    """Figures of other runs are shown beside new ones, in the models' order, and not measured again."""
    path, out, asked = tmp_path / "before.json", io.StringIO(), []
    path.write_text(training.to_json([measured("Llama", graphs=1, same=True, our_min_cut_bytes=2.0**21)], {}))

    def measure(models, device, **settings):
        asked.extend(trained.name for trained in models)
        yield measured("ViT", graphs=2, same=False)

    monkeypatch.setattr(training, "measure", measure)
    assert training.main(["--only", "Llama", "ViT", "--with", str(path), "--markdown"], out=out) == 0
    assert asked == ["ViT"]
    *_, head, rule, first, second = out.getvalue().strip().splitlines()
    assert head in Path(training.__file__).with_name("RESULTS.md").read_text()
    assert rule == "| --- | ---: | ---: | --- |" + 8 * " ---: |"
    assert first == "| ViT | 0 | 2 | nan → nan |" + 8 * " – |"
    assert second == "| Llama | 0 | 1 | nan → nan | – | – | – | – | 2.00 | – | – | – |"


def test_ratios_of_noisy_runs_are_not_shown():
    """Where the same program took more than 5 % longer or less, a ratio of times says nothing."""
    quiet, noisy = (
        measured("a", step=0.5, over_eager=2.0, again=0.96),
        measured("b", step=0.5, over_eager=2.0, again=1.06),
    )
    *_, first, second = training.markdown([quiet, noisy]).splitlines()
    assert first.endswith("| 0.50 | 2.00 |")
    assert second.endswith("| – | – |")


def test_an_interrupt_shows_what_there_is(monkeypatch, tmp_path):
    """The measurements before Ctrl-C are printed and were written, and the command says that it was interrupted."""

    def measure(models, device, **settings):
        yield measured("U-Net", graphs=3)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "measure", measure)
    out, path = io.StringIO(), tmp_path / "figures.json"
    assert training.main(["--json", str(path)], out=out) == 130
    assert "U-Net" in out.getvalue()
    assert [each.graphs for each in training.from_json([path.read_text()])] == [3]


def test_broken_promises():
    """More bytes than in eager or, but for 2 %, than upstream's min-cut keeps, and larger errors, are problems."""
    fine = {"our_bytes": 100, "our_min_cut_bytes": 51, "eager_bytes": 100, "stock_bytes": 50, "within": True}
    assert training._broken_promises(fine) == []
    assert training._broken_promises({**fine, "our_bytes": 101}, held=False) == []
    errors = {f"{whose}_{kind}_error": 1.0 for whose in ("our", "stock") for kind in ("loss", "gradient", "buffer")}
    for name, value in (("our_bytes", 101), ("our_min_cut_bytes", 52), ("stock_bytes", 49), ("within", False)):
        assert len(training._broken_promises({**fine, **errors, name: value})) == 1, name


class Odd(torch.nn.Module):
    """A layer whose loss is another one for batches of three, if Dynamo captures it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        """Return the loss."""
        wrong = torch.compiler.is_compiling() and x.shape[0] == 3
        return {"loss": (self.layer(x).sin().sum() * (2 if wrong else 1))}


def sized(model):
    """Make a model whose batches have sizes."""

    def batch(generator, count=5):
        return {"x": torch.randn(count, 4, generator=generator)}

    return training.Trained(name="sized", description="", model=model, batch=batch, sizes=((5,), (2,), (3,), (7,)))


class Layer(Odd):
    """The same, but right."""

    def forward(self, x):
        """Return the loss."""
        return {"loss": self.layer(x).sin().sum()}


def test_sizes():
    """Batches of several sizes need one compilation beyond the first, no call runs eagerly, and each equals eager."""
    found = varied(sized(Layer), torch.device("cpu"), backend="eager", rounds=2, say=lambda text: None)
    assert (found["sizes"], found["sizes_alike"], found["sizes_wrong"]) == (4, 4, ())
    assert (found["sizes_our_compilations"], found["sizes_stock_compilations"], found["sizes_eager_share"]) == (2, 2, 0)
    assert min(found[name] for name in ("sizes_our_seconds", "sizes_stock_seconds", "sizes_again")) > 0


def test_a_wrong_size_is_named():
    """A size that gives another loss is not counted, and a problem."""
    (row,) = training.measure([sized(Odd)], torch.device("cpu"), inductor=False, rounds=1, say=lambda text: None)
    assert (row.same, row.sizes_alike, row.sizes_wrong) == (True, 3, ((3,),))
    assert row.problem == "at the sizes (3,) the results differ from eager's"


def stock_would_raise(*args, **settings):
    """Raise, like a compiler that cannot train a model."""
    raise AssertionError("stock was asked")


def test_what_stock_cannot_train(monkeypatch):
    """It is left out: dashes in its columns, and nothing that is missing is a problem."""
    monkeypatch.setattr("aotlab.maintenance.bench.sizes.by_stock", stock_would_raise)
    alone = replace(sized(Layer), by_stock=False)
    (row,) = training.measure([alone], torch.device("cpu"), inductor=False, rounds=1, say=lambda text: None)
    assert (row.problem, row.sizes_alike, row.sizes_our_compilations) == ("", 4, 2)
    assert training.markdown([row]).splitlines()[-1] == "| sized | 4 of 4 | 2 | – | 0% | – | – |"
    (row,) = training.measure([sized(Layer)], torch.device("cpu"), inductor=False, rounds=1, say=lambda text: None)
    assert "stock was asked" in row.problem


@pytest.mark.tier("full")
def test_what_stock_cannot_train_on_inductor(monkeypatch):
    """Its errors are then limited by eager's, and eager alone is timed beside it."""
    monkeypatch.setattr(training, "by_stock", stock_would_raise)
    monkeypatch.setattr("aotlab.maintenance.bench.sizes.by_stock", stock_would_raise)
    pinn = replace(MODELS["PINN"], sizes=())
    (row,) = training.measure([pinn], torch.device("cpu"), inductor=True, rounds=1, say=lambda text: None)
    assert (row.problem, row.same, row.within) == ("", True, True)
    assert row.over_eager > 0
    assert math.isnan(row.step)
    assert row.our_gradient_error > 0


def test_near_sizes():
    """By Inductor a step may err twice as much as the worst of the others; on the eager backend not at all."""
    found = [(0.0, 0.0, 0.0), (2e-5, 2e-3, 1e-6), (2e-5, 3e-3, 0.0), (3e-5, 0.0, 0.0), (0.0, 0.0, 2e-6)]
    assert as_near(found, [(1e-5, 0.0, 0.0), (0.0, 1e-3, 0.0)]) == [True, True, False, False, False]
    assert as_near(found, []) == [True, False, False, False, False]


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["Llama", "U-Net"])
def test_sizes_of_models(name):
    """One compilation beyond those for Dynamo's guards serves all sizes, as with torch.compile, bit for bit."""
    if name in ROUNDED_BY_DYNAMO:
        pytest.skip("stock Dynamo's capture rounds otherwise than the model, so that no size can be as eager")
    found = varied(MODELS[name], torch.device("cpu"), backend="eager", rounds=1, say=lambda text: None)
    assert (found["sizes_alike"], found["sizes_eager_share"]) == (12, 0)
    assert 2 <= found["sizes_our_compilations"] <= found["sizes_stock_compilations"]


def test_twelve_sizes():
    """Each model has twelve sizes, all different, the batches as large as they say."""
    for trained in MODELS.values():
        assert len(set(trained.sizes)) == 12
        shapes = {next(iter(trained.batch(torch.Generator(), *size).values())).shape[0] for size in trained.sizes}
        assert len(shapes) == 12
        if trained.name == "Llama":
            assert trained.batch(torch.Generator(), 64, 17)["labels"].shape == (64, 17)
        if trained.name == "BERT":  # padded: of a padded place nothing is learned
            batch = trained.batch(torch.Generator().manual_seed(0), 64, 17)
            assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
            assert 0 < batch["attention_mask"].sum() < 64 * 17


def test_markdown_of_sizes():
    """The sizes have a separate table, with times only where the noise was small."""
    values = {"sizes": 12, "sizes_alike": 12, "sizes_our_compilations": 2, "sizes_stock_compilations": 3}
    seconds = {"sizes_eager_share": 0.25, "sizes_our_seconds": 9.04, "sizes_stock_seconds": 10.0}
    rows = [measured("a", **values, **seconds, sizes_again=1.04), measured("b", **values, **seconds, sizes_again=1.1)]
    *_, head, rule, first, second = training.markdown([*rows, measured("c")]).splitlines()
    assert head.startswith("| model | sizes as eager | compiled: ours | `torch.compile` |")
    assert rule == "| --- |" + 6 * " ---: |"
    assert first == "| a | 12 of 12 | 2 | 3 | 25% | 9.0 | 10.0 |"
    assert second == "| b | 12 of 12 | 2 | 3 | 25% | – | – |"
    again = training.from_json([training.to_json([measured("a", sizes_wrong=((2, 3),))], {})])
    assert again[0].sizes_wrong == ((2, 3),)
