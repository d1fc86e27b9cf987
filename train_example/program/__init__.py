"""The program behind the command line: runs with presets, meshes, checkpoints and figures.

`arguments` and `presets` say what was asked for, `setup` checks it, `run` carries it out over `devices`; `checkpoints`,
`metrics`, `plot` and `sample` are what it leaves, `terminal` what it shows. `plan` computes the memory that a GPU would
need, and `experts_layer` the conventional layers to compare with.
"""
