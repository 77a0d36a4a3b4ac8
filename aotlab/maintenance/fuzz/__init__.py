"""The fuzzer: ``aotlab fuzz`` runs random programs on an engine and on eager, and saves the programs that differ.

The modules, in the order of a run:

- `plan`: the settings of a run;
- `drawing`: draw thousands of programs, and shrink a failing program with Hypothesis;
- `engines`: aotlab and torch's own engine, each on the function itself and behind Dynamo;
- `failures`: name the failures, and shrink them to the smallest program that fails in the same way;
- `cell` and `compare`: write a failure as a notebook cell, and the function that the cell calls to show it;
- `block`: run a block of two hundred programs;
- `workers`: run blocks in one process or several;
- `state`: store finished blocks, so that a stopped run can continue;
- `corpus`: count the programs of all runs;
- `table` and `progress`: the table at the end, and the progress bar;
- `run`: the whole run.

It needs Hypothesis, the extra ``fuzz``.
"""
