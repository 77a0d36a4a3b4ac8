"""The measured programs do what their descriptions say."""

from __future__ import annotations

import pytest
import torch

from aotlab.maintenance.bench.programs import SMALL_PROGRAMS, SmallProgram, model_programs

CPU = torch.device("cpu")


def _named(name: str) -> SmallProgram:
    return next(program for program in SMALL_PROGRAMS if program.name == name)


@pytest.mark.parametrize("program", SMALL_PROGRAMS, ids=lambda program: program.name)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_every_small_program_runs(program: SmallProgram, training: bool) -> None:
    """In both modes: leaves that require grad or not, and arguments that the program may be called with."""
    leaves = program.leaves(CPU, training)
    assert all(leaf.is_leaf and leaf.requires_grad == training for leaf in leaves)
    program.function(*program.arguments(leaves))


def test_the_mutating_program_mutates_and_leaves_the_leaf_alone() -> None:
    """In training it writes to a copy that autograd connects to the leaf; in inference to the argument itself."""
    program = _named("mutating")
    (leaf,) = program.leaves(CPU, True)
    (argument,) = program.arguments((leaf,))
    before = leaf.detach().clone()
    program.function(argument)
    assert torch.equal(leaf, before)
    assert torch.equal(argument, before + 1)
    (plain,) = program.leaves(CPU, False)
    assert program.arguments((plain,)) == (plain,)


def test_the_aliasing_programs_alias() -> None:
    """One returns its argument's memory, one two tensors of one new memory."""
    (x,) = _named("aliasing").leaves(CPU, False)
    view = _named("aliasing").function(x)
    assert isinstance(view, torch.Tensor)
    assert view.data_ptr() == x.data_ptr()
    result = _named("intermediate base").function(x)
    assert isinstance(result, tuple)
    first, second = result
    assert first.data_ptr() == second.data_ptr() != x.data_ptr()


def test_a_hundred_inputs_are_a_hundred() -> None:
    """The wide program takes a hundred tensors."""
    assert len(_named("100 inputs").leaves(CPU, False)) == 100


@pytest.mark.parametrize(("quick", "names"), [(True, ("20", "2")), (False, ("200", "12"))])
def test_models_have_the_layers_that_their_names_say(quick: bool, names: tuple[str, str]) -> None:
    """The full figures are for 200 linear layers and an encoder of 12."""
    mlp, encoder = model_programs(quick)
    linear = sum(isinstance(module, torch.nn.Linear) for module in mlp.make(CPU)[0].modules())
    blocks = sum(isinstance(m, torch.nn.TransformerEncoderLayer) for m in encoder.make(CPU)[0].modules())
    assert names == (str(linear), str(blocks))
    assert (mlp.name, encoder.name) == (f"MLP, {names[0]} layers", f"encoder, {names[1]} layers")


def test_models_are_the_same_every_time_and_train_without_dropout() -> None:
    """Two builds are equal, two training runs of one are equal, and torch's seed is left alone."""
    _, encoder = model_programs(quick=True)
    state = torch.get_rng_state()
    (model, batch), (again, _) = encoder.make(CPU), encoder.make(CPU)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert torch.equal(model(*batch), again(*batch))
    assert torch.equal(model(*batch), model(*batch))
