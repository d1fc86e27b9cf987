"""The program behind the command line: runs with presets, meshes, checkpoints and figures.

`arguments` and `presets` say what was asked for. `run` checks it and carries it out, over `devices`, with the `model`
that it names; `checkpoints`, `metrics` and `results` are what it leaves and shows. `measured` and `step_parts` serve
the programs beside it, `compare_layers` and `profile_step`.
"""
