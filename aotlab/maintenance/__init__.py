"""The tools of the maintainers, which test and measure the engine. Nothing else in aotlab imports them.

- `acceptance`: run the checks that need a GPU (``aotlab acceptance``);
- `bench`: compare times and memory with upstream, for small programs, partitioners, varying sizes and real models
  (``aotlab bench``);
- `fuzz`: compare the engine with eager on random programs (``aotlab fuzz``);
- `op_database`: compare the engine with eager on torch's own samples of each operator (``aotlab verify ops``).
"""
