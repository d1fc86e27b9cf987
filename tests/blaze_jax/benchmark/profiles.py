"""Profiles written by hand, in the shape that the profiler gives those of a GPU."""

from jax.profiler import ProfileData


def profile(events, *, plane="/device:GPU:0", line="Stream #13(Compute)", extra_planes=""):
    """A profile with `(name, start_us, duration_us, module)` on one line of one plane."""
    names = sorted({name for name, *_ in events})
    metadata = "".join(
        f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{n}" }} }}\n' for i, n in enumerate(names)
    )
    written = "".join(
        f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {int(start * 1e6)} duration_ps: {int(us * 1e6)} "
        f'stats {{ metadata_id: 1 str_value: "{module}" }} }}\n'
        for name, start, us, module in events
    )
    return ProfileData.from_text_proto(
        f"""{extra_planes}
        planes {{
          name: "{plane}"
          lines {{ name: "{line}" timestamp_ns: 1000 {written} }}
          lines {{ name: "XLA Modules" timestamp_ns: 1000 {written} }}
          {metadata}
          stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_module" }} }}
        }}"""
    )
