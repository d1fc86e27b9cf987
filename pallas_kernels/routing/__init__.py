"""Routing as kernels of the language `simt`, for any NVIDIA GPU since Ampere: which rows there are, and their sums.

- `router`: experts and weights of every token, with the losses' sums (`router_choice`).
- `dispatch`: the chosen pairs as rows grouped by expert, and parts of these rows (`dispatch_place`, `block_sums`).
- `token_selection`: what is needed where experts choose tokens.
- `combine`: sums over each token's rows.
"""
