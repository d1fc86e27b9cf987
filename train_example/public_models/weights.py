"""Whole public models, OLMoE, Qwen3-MoE and gpt-oss: their weights as the decoder's parameters, and back again."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import P, lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from blaze_jax import MoEConfig, checkpoints, merge
from blaze_jax.adapters import is_adapter
from blaze_jax.checkpoints.folder import DTYPES, INDEX
from blaze_jax.checkpoints.layouts import PLAIN, find_block
from blaze_jax.checkpoints.loading import place
from blaze_jax.checkpoints.saving import layer_tensors
from blaze_jax.checkpoints.writing import NewTensor, write_tensors
from blaze_jax.json_file import read_json
from blaze_jax.quantized import WEIGHTS, Form, is_quantized, quantize
from train_example.config import UserError
from train_example.model import Decoder
from train_example.program.jit_once import jit_once
from train_example.public_models.adapted import KERNEL_A, KERNEL_B, compressed_kernel
from train_example.step import working_copy

type Params = dict[str, Any]
type Names = tuple[str, ...]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WITHOUT_MEANING = ("rotary_emb.inv_freq",)


class Entry(NamedTuple):
    """A tensor of a public model, and how a parameter lies in it.

    Attributes:
      name: the tensor's name; without the layer's prefix where it is a layer's.
      order: the parameter's axes in the file's order; empty for a parameter that is the tensor.
      rows: how many of them, as they are ordered then, the tensor's first axis has.
    """

    name: str
    order: tuple[int, ...] = ()
    rows: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, for a parameter of that shape."""
        ordered = [shape[axis] for axis in self.order]
        axes = ordered[: self.rows], ordered[self.rows :]
        return tuple(math.prod(sizes) for sizes in axes if sizes) if ordered else shape

    def parameter(self, values: Any, shape: tuple[int, ...]) -> Any:
        """The parameter of that shape, from what the file holds."""
        if not self.order:
            return values
        return values.reshape([shape[axis] for axis in self.order]).transpose(np.argsort(self.order))

    def stored(self, parameter: Any) -> Any:
        """The tensor that the file holds, from the parameter."""
        return parameter.transpose(self.order).reshape(self.shape(parameter.shape)) if self.order else parameter


_TURNED = ((1, 0),)
_TO_HEADS = ((1, 2, 0), 2)  # a parameter (d, heads, h), a matrix (heads · h, d)
_FROM_HEADS = ((2, 0, 1),)  # a parameter (heads, h, d), a matrix (d, heads · h)
_OF_HEADS = ((0, 1), 2)  # a parameter (heads, h), a vector (heads · h,)
_OF_MODEL = {
    ("embedding",): Entry(_EMBEDDING),
    ("final_norm", "scale"): Entry("model.norm.weight"),
    ("head", "kernel"): Entry(_HEAD, *_TURNED),
}
_OF_LAYER = {
    ("attention_norm", "scale"): Entry("input_layernorm.weight"),
    ("attention", "query", "kernel"): Entry("self_attn.q_proj.weight", *_TO_HEADS),
    ("attention", "key", "kernel"): Entry("self_attn.k_proj.weight", *_TO_HEADS),
    ("attention", "value", "kernel"): Entry("self_attn.v_proj.weight", *_TO_HEADS),
    ("attention", "out", "kernel"): Entry("self_attn.o_proj.weight", *_FROM_HEADS),
    ("attention", "query", "bias"): Entry("self_attn.q_proj.bias", *_OF_HEADS),
    ("attention", "key", "bias"): Entry("self_attn.k_proj.bias", *_OF_HEADS),
    ("attention", "value", "bias"): Entry("self_attn.v_proj.bias", *_OF_HEADS),
    ("attention", "out", "bias"): Entry("self_attn.o_proj.bias"),
    ("attention", "sinks"): Entry("self_attn.sinks"),
    ("attention", "query_norm", "scale"): Entry("self_attn.q_norm.weight"),
    ("attention", "key_norm", "scale"): Entry("self_attn.k_norm.weight"),
    ("feed_forward_norm", "scale"): Entry("post_attention_layernorm.weight"),
    ("feed_forward", "gate", "kernel"): Entry("mlp.gate_proj.weight", *_TURNED),
    ("feed_forward", "up", "kernel"): Entry("mlp.up_proj.weight", *_TURNED),
    ("feed_forward", "down", "kernel"): Entry("mlp.down_proj.weight", *_TURNED),
}


def load_params(
    folder: str | Path,
    model: Decoder,
    shardings: Params | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    experts: bool = True,
    base: Form | None = None,
    attention: Form | None = None,
) -> Params:
    """The parameters of a public model, as the decoder has them; those of unrolled blocks as `layers_apart` has them.

    A decoder's adapters are not among them.

    Args:
      folder: where it is.
      model: the decoder.
      shardings: where each parameter goes, by `NamedSharding`; None for the first device.
      dtype: type of the matrices; what `working_copy` leaves in float32 is float32.
      experts: whether the layers of experts are read, too, or left to `load_experts`.
      base: the form in which the experts' weights stay compressed; None for plain numbers.
      attention: the form of the attention's kernels, the same.

    Raises:
      UserError: a tensor is missing, unknown or of another shape or type; the message names it and its file.
    """
    try:
        files = checkpoints.Folder(folder)
        like = params_like(model, shardings, dtype, base, attention)
        _check_names(files, model, like)
        if not experts:
            like = {path: leaf for path, leaf in like.items() if "moe" not in path}
        others = _read(files, "", _OF_MODEL, like)
        return _layer_by_layer(model, like, others, partial(_load_layers, files, model))
    except checkpoints.CheckpointError as error:
        raise UserError(f"--checkpoint {folder}: {error}") from error


def random_params(
    model: Decoder, *, dtype: DTypeLike, base: Form | None = None, attention: Form | None = None, seed: int = 0
) -> Params:
    """Random numbers in the place of what `load_params` reads, for timing; drawn, and compressed, where they stay."""
    like = params_like(model, None, dtype, base, attention)

    def drawn_of(number: int, of: dict[Names, Any]) -> dict[Names, Any]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), len(of))
        return {
            path: jnp.ones(leaf.shape, leaf.dtype) if path[-1] == "scale" else drawn(key, leaf)
            for key, (path, leaf) in zip(keys, of.items(), strict=True)
        }

    def layers_of(layers: list[int], of_stack: dict[Names, Any]) -> Iterator[dict[Names, Any]]:
        draw = jit_once(partial(drawn_of, of={path: _of_one_layer(leaf) for path, leaf in of_stack.items()}))
        yield from map(draw, layers)

    of_model = {path: leaf for path, leaf in like.items() if path in _OF_MODEL}
    others = jit_once(partial(drawn_of, of=of_model))(model.config.num_layers)
    return _layer_by_layer(model, like, others, layers_of)


def drawn(key: Array, leaf: Any) -> Any:
    """Random numbers of the leaf's shape and type, compressed where it is."""
    if is_quantized(leaf):  # an expert at a time, for little memory beside the result
        draw = partial(jax.random.normal, shape=leaf.shape[1:], dtype=leaf.dtype)
        return lax.map(lambda key: quantize(0.02 * draw(key), leaf.form), jax.random.split(key, leaf.shape[0]))
    return 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)


def load_experts(
    folder: str | Path, model: Decoder, *, dtype: DTypeLike = jnp.float32, base: Form | None = None
) -> Iterator[Params]:
    """The variables of each layer of experts, one after the other, in the host's memory; see `load_params`."""
    files = checkpoints.Folder(folder)
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    try:
        for stack, layers in model.config.stacks().items():
            for layer in layers if stack.startswith("moe") else ():
                loaded = checkpoints.load(files, layer, model.moe, sharding=here, base=base)
                plain = working_copy({n: p for n, p in loaded.params.items() if not is_quantized(p)}, dtype)
                yield {**loaded.variables, "params": {**loaded.params, **plain}}
    except checkpoints.CheckpointError as error:
        raise UserError(f"--checkpoint {folder}: {error}") from error


def save_model(out: Path, origin: str | Path, model: Decoder, params: Params) -> None:
    """Writes the model in the format of the one that it came from, in that one's types, with its other files.

    Experts that were compressed are written in full, in bfloat16, and `config.json` tells of no compression any more.
    The folder appears when all of it is written.

    Raises:
      UserError: the folder is there already, or cannot be written.
    """
    origin = Path(origin)
    files = checkpoints.Folder(origin)
    unfinished = out.with_name(out.name + ".unfinished")
    if out.exists():
        raise UserError(f"the model cannot be saved: {out} is there already")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        write_tensors(unfinished, _new_tensors(files, "", _OF_MODEL, _flat(params)), "embedding")
        like = params_like(model, None, jnp.bfloat16)
        for stack, layers in model.config.stacks().items():
            kernels = {path[1:]: leaf.shape[1:] for path, leaf in like.items() if path[::3] == (stack, "kernel")}
            for at, layer in enumerate(layers):
                of_stack = params[stack]
                one = of_stack[at] if isinstance(of_stack, tuple) else jax.tree.map(itemgetter(at), of_stack)
                one = _of_layer(files, model.moe, layer, _decoded_kernels(_flat(one), kernels))
                write_tensors(unfinished, one, f"layer-{layer:05}")
        for path in origin.iterdir():
            weights = path.name == INDEX or path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
            if path.is_file() and not weights:
                shutil.copyfile(path, unfinished / path.name)
        config = unfinished / "config.json"
        if config.exists() and (fields := read_json(config)).pop("quantization_config", None):
            config.write_text(json.dumps(fields, indent=2))
        unfinished.rename(out)
    except (checkpoints.CheckpointError, OSError) as error:
        raise UserError(f"the model cannot be saved: {error}") from error


def _flat(params: Any) -> dict[Names, Array]:
    """The parameters by their names from the outside to the inside."""
    flat: Any = flatten_dict(params)
    return flat


def _of_layer(files: checkpoints.Folder, moe: MoEConfig, layer: int, params: dict[Names, Array]) -> Iterator[NewTensor]:
    if moe.adapter is not None:
        params = _merged_attention(params, moe.adapter.scale)
    yield from _new_tensors(files, _prefix(layer), _OF_LAYER, params)
    if experts := {name[1]: value for name, value in params.items() if name[0] == "moe"}:
        if moe.adapter is not None:
            experts, moe = merge(experts, moe), replace(moe, adapter=None)
        block = checkpoints.Layer(experts, layout=find_block(files, layer, moe).layout.name.removesuffix("_mxfp4"))
        dtypes = {
            new.name: DTYPES[files[new.name].dtype if new.name in files else "BF16"]  # MXFP4, which is written in full
            for new in layer_tensors(layer, block, moe)
        }
        in_dtype = {dtype: layer_tensors(layer, block, moe, dtype) for dtype in set(dtypes.values())}
        for number, dtype in enumerate(dtypes.values()):
            yield in_dtype[dtype][number]


def _decoded_kernels(params: dict[Names, Any], kernels: dict[Names, tuple[int, ...]]) -> dict[Names, Array]:
    """The parameters of a layer, with numbers in the place of compressed kernels, whose shapes are given."""
    return {
        path: param.astype(jnp.bfloat16).reshape(kernels[path]) if is_quantized(param) and path in kernels else param
        for path, param in params.items()
    }


def _merged_attention(params: dict[Names, Array], scale: float) -> dict[Names, Array]:
    """The parameters of a layer with the adapters of its attention added to the projections."""
    merged = dict(params)
    for path, a in params.items():
        if path[-1] == KERNEL_A:
            at = *path[:-1], "kernel"
            change = scale * jnp.matmul(a, params[*path[:-1], KERNEL_B], precision="highest").astype(jnp.float32)
            merged[at] = (params[at] + change.reshape(params[at].shape)).astype(params[at].dtype)
    return merged


def _new_tensors(
    files: checkpoints.Folder, prefix: str, entries: dict[Names, Entry], params: dict[Names, Array]
) -> Iterator[NewTensor]:
    """The tensors of these entries, each in the type that it had."""

    def stored(path: Names) -> Iterator[np.ndarray]:
        yield entries[path].stored(np.asarray(params[path])).astype(DTYPES[files[prefix + entries[path].name].dtype])

    for path in filter(params.__contains__, entries):  # in their order
        name, shape = prefix + entries[path].name, entries[path].shape(params[path].shape)
        yield NewTensor(name, files[name].dtype, shape, partial(stored, path))


def _load_layers(
    files: checkpoints.Folder, model: Decoder, layers: list[int], like: dict[Names, Any]
) -> Iterator[dict[Names, Any]]:
    """The parameters of each of a run of blocks; `like` says how all of them are stacked."""
    of_layer = {path: _of_one_layer(leaf) for path, leaf in like.items()}
    of_experts = {path[1]: leaf for path, leaf in of_layer.items() if path[0] == "moe"}
    experts = {name: jax.tree.leaves(leaf)[0].sharding for name, leaf in of_experts.items()}
    base = next((leaf.form for leaf in of_experts.values() if is_quantized(leaf)), None)
    for layer in layers:
        one = _read(files, _prefix(layer), _OF_LAYER, of_layer)
        if experts:
            loaded = checkpoints.load(files, layer, model.moe, sharding=experts, base=base)
            for name, value in loaded.params.items():  # the router's type may be its own
                one["moe", name] = value if is_quantized(value) else value.astype(of_experts[name].dtype)
        yield one


def _layer_by_layer(
    model: Decoder,
    like: dict[Names, Any],
    others: dict[Names, Array],
    layers_of: Callable[..., Iterator[dict[Names, Any]]],
) -> Params:
    """A model's parameters: `others`, and those of its layers, a stack of which `layers_of(layers, like)` yields.

    They are in stacks, each filled one layer after the other, or apart where the model's blocks are unrolled.
    """
    params = unflatten_dict(others)
    for name, layers in model.config.stacks().items():
        of_stack = {path[1:]: leaf for path, leaf in like.items() if path[0] == name}
        if model.unroll:
            params[name] = tuple(map(unflatten_dict, layers_of(layers, of_stack)))
            continue
        stacked = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), of_stack)
        put = jax.jit(_put, donate_argnums=0, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, of_stack))
        for at, one in enumerate(layers_of(layers, of_stack)):
            stacked = put(stacked, one, at)
        params[name] = unflatten_dict(stacked)
    return params


def _put(stacked: dict[Names, Array], one: dict[Names, Array], at) -> dict[Names, Array]:
    return jax.tree.map(lambda stack, value: lax.dynamic_update_index_in_dim(stack, value, at, 0), stacked, one)


def _read(
    files: checkpoints.Folder, prefix: str, entries: dict[Names, Entry], like: dict[Names, Any]
) -> dict[Names, Array]:
    """The parameters of these entries, as and where `like` has them."""
    params = {}
    for path in filter(like.__contains__, entries):
        tensor, entry, leaf = files[prefix + entries[path].name], entries[path], like[path]
        if is_quantized(leaf):
            tensor.require(PLAIN, leaf.shape[:0:-1])
            matrix = place(tensor.read().T[None].astype(leaf.dtype), leaf.values.sharding)
            params[path] = _quantized(matrix, leaf.form)
            continue
        shape = leaf.shape
        tensor.require(PLAIN, entry.shape(shape))
        params[path] = place(np.asarray(entry.parameter(tensor.read(), shape), leaf.dtype), leaf.sharding)
    return params


_quantized = jax.jit(quantize, static_argnums=1)


def params_like(
    model: Decoder,
    shardings: Params | None,
    dtype: DTypeLike,
    base: Form | None = None,
    attention: Form | None = None,
) -> dict[Names, Any]:
    """The shapes and types of the model's parameters without adapters, and where each goes; see `load_params`."""
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    params = jax.eval_shape(partial(working_copy, dtype=dtype), variables["params"])
    shapes: dict[Names, Any] = {path: leaf for path, leaf in _flat(params).items() if not is_adapter(path[-1])}
    places: dict[Names, Any] = dict.fromkeys(shapes, SingleDeviceSharding(jax.local_devices()[0]))
    places |= flatten_dict({name: _of_stack(of_name) for name, of_name in (shardings or {}).items()})
    for path, leaf in shapes.items():
        if base is not None and path[-2:-1] == ("moe",) and path[-1] in WEIGHTS:
            leaf = jax.eval_shape(partial(quantize, form=base), leaf)
        if attention is not None and path[-3:-2] == ("attention",) and path[-1] == "kernel":
            leaf = jax.eval_shape(partial(compressed_kernel, path[-2], form=attention), leaf)
        shapes[path] = jax.tree.map(partial(_placed_at, places[path]), leaf)
    return shapes


def _placed_at(sharding: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _of_stack(shardings: Any) -> Any:
    """The shardings of a stack, also from those of its layers, which are alike."""

    def one(of_layer: NamedSharding) -> NamedSharding:
        return NamedSharding(of_layer.mesh, P(None, *of_layer.spec))

    return jax.tree.map(one, shardings[0]) if isinstance(shardings, tuple) else shardings


def _of_one_layer(stack: Any) -> Any:
    """A layer's part of a stack of them, which is not split along that axis."""

    def one(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = array.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)

    return jax.tree.map(one, stack)


def _check_names(files: checkpoints.Folder, model: Decoder, like: dict[Names, Any]) -> None:
    """Raises CheckpointError for a tensor outside the blocks of experts, which check their own, that has no place."""
    known = {entry.name for entry in _OF_MODEL.values()}
    experts = []
    for stack, layers in model.config.stacks().items():
        names = [entry.name for path, entry in _OF_LAYER.items() if (stack, *path) in like]
        known |= {_prefix(layer) + name for layer in layers for name in names}
        experts += [f"{_prefix(layer)}mlp." for layer in layers if stack.startswith("moe")]
    for name in files.names:
        if name not in known and not name.startswith(tuple(experts)) and not name.endswith(_WITHOUT_MEANING):
            raise checkpoints.CheckpointError(f"{files.origin}: tensor {name!r} has no place in the model")
    if model.config.tied_head and _HEAD in files and not np.array_equal(files[_HEAD].read(), files[_EMBEDDING].read()):
        raise checkpoints.CheckpointError(
            f"{files[_HEAD]} is not {_EMBEDDING!r}, though config.json has tie_word_embeddings=true"
        )


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."
