"""Rows about Python values, objects and files."""

from __future__ import annotations

from aotlab.errors import BY_DYNAMO, TAKE_DYNAMO
from aotlab.fallbacks.row import Fallback

ROWS: tuple[Fallback, ...] = (
    Fallback(
        id="reads-the-clock",
        sentence="`{clock}` returns another time at each call",
        example={"clock": "time.time"},
        suggestion="pass the time as an argument",
        program="""
import time

def f(x):
    return x * (time.time() > 0)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="no-guard-for-what-it-reads",
        sentence="no guard can check everything that the function reads: {what}",
        example={"what": "it reads `counter`, a `count`"},
        suggestion=f"pass the value as an argument, or {TAKE_DYNAMO}",
        program="""
import itertools

counter = itertools.count()

def f(x):
    return x * next(counter)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="finds-tensor-by-identity",
        sentence="the function may find a tensor by its identity: {what}",
        example={"what": "`scales` has tensors for keys"},
        suggestion=f"look it up by a name, or {BY_DYNAMO}",
        program="""
key = torch.ones(3)
scales = {key: 2}

def f(x):
    return x * scales[key]

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="module-talks-to-processes",
        sentence="`{name}` is a `{kind}`, which communicates with other processes at each call",
        example={"name": "model", "kind": "DistributedDataParallel"},
        suggestion=f"compile the module itself (of FSDP2, each module that `fully_shard` shards), or {BY_DYNAMO}",
        program="""
from torch.nn.parallel import DistributedDataParallel

model = DistributedDataParallel.__new__(DistributedDataParallel)
torch.nn.Module.__init__(model)
model.forward = lambda x: x * 2

def f(x):
    return model(x)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="applies-python-per-element",
        sentence="`{op}` calls a Python function for each element of a tensor",
        example={"op": "apply_"},
        suggestion="compute with whole tensors",
        program="""
def f(x):
    return x.detach().clone().apply_(lambda element: element + 1)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="reads-values",
        sentence="`{op}` reads the values of a traced tensor",
        example={"op": "tensor", "instead": "use torch.stack"},
        suggestion="{instead}",
        program="""
def f(x):
    return torch.tensor([x.sum(), 1.0])

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="asks-is-inference",
        sentence="`{op}` would return a property of the traced tensor, not of the caller's tensor",
        example={"op": "is_inference"},
        suggestion="call it outside of the function, and pass the result as an argument",
        program="""
def f(x):
    return x * 2 if x.is_inference() else x * 3

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="warning-turned-into-error",
        sentence="a warning filter turns a warning of the function into an error",
        suggestion="change the program so that it does not warn",
        program="""
import warnings

warnings.filterwarnings("error", "slow path")

def f(x):
    try:
        warnings.warn("slow path")
    except UserWarning:
        return x * 3
    return x * 2

args = (torch.ones(3),)
""",
    ),
)
