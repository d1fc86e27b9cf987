"""Text from a model, a token at a time, and the likelihood of texts: `python -m train_example.generate`.

- `sampling`: how a token is chosen from logits, on the device.
- `decoding`: prompts go through the model in chunks, then tokens one by one, by two programs of fixed shapes; keys and
  values of what was before are in a cache.
- `streaming`: the same a layer at a time, with experts that come from the host's memory.
- `offload`: what is planned for so much of a GPU, and the generator of that plan.
- `models`: the model of a run or a public one, with what makes tokens of its text.
- `files`: prompts or texts from a file, results into another one, which a stopped run goes on with.
- `timing`: how fast it is, with random weights.
"""
