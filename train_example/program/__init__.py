"""The program behind the command line: runs with presets, meshes, checkpoints and figures.

`arguments` and `presets` say what was asked for. `run` checks it and carries it out, over `devices`, with the `model`
that it names; `checkpoints`, `metrics` and `results` are what it leaves and shows.
"""
