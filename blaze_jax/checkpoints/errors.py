"""What a checkpoint can have wrong with it."""


class CheckpointError(ValueError):
    """A file of a checkpoint is not what it should be; the message names it, and the tensor or the field."""


class MissingExtraError(ImportError):
    """A package is not installed that reading checkpoints needs; the message names the extra."""


def import_safetensors():
    """The library safetensors; MissingExtraError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError("checkpoints need safetensors: pip install 'blaze_jax[checkpoints]'") from error
    return safetensors
