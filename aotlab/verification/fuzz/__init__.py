"""The fuzzer: ``aotlab fuzz`` runs random programs on an engine and on eager, and keeps what differs.

In the order of a run: `plan` (what is run), `drawing` (Hypothesis by the thousand), `engines` (ours and torch's, direct
and behind Dynamo), `failures` (their names, and how they shrink), `cell` (a failure as a notebook cell), `block` (two
hundred programs), `workers` (one process or several), `state` (how a run goes on after a stop), `corpus` (counts over
all runs), `table`, `progress`, and `run`, which puts them together. It needs Hypothesis, the extra ``fuzz``.
"""
