"""Models larger than the GPU: layers of experts in host memory, which come when they are needed.

- `compression`: weights without loss in 11.2 or 12.1 bits, decoded on the device.
- `store`: layers in pinned host memory, streamed under the work of the layer before.
- `chunks`: a layer of which three do not fit, some of its experts at a time.
- `plan`: what stays on the device, what limits the speed, and how fast it will be, before anything runs.
"""
