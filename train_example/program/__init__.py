"""The program behind the command line: runs with presets, meshes, checkpoints and figures.

`arguments` and `presets` say what was asked for, `setup` checks it, `run` carries it out over `devices`; `checkpoints`,
`metrics` and `results` are what it leaves and shows. `plan` computes the memory that a GPU would
need, and `experts_layer` the conventional layers to compare with.
"""
