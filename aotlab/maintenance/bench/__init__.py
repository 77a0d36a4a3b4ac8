"""The benchmarks of ``aotlab bench``: compare the times and memory of aotlab with eager's and upstream's.

- `suite`: the time of a trace and the overhead of a call, for the functions and models in `programs`;
- `partitioners`: the times of the partitioners, and the memory that the forward keeps for the backward;
- `symbolic`: the cost of compiling for all sizes;
- `disk`: the time until the first result of a second process, which finds Inductor's cache on disk;
- `training`: train the `models` and `networks`, with the steps in `courses` and, for varying batch sizes, in `sizes`.
"""
