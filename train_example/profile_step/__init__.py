"""Where a training step's time goes on a GPU, part by part: `python -m train_example.profile_step`."""
