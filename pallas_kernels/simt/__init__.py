"""Router, dispatch, combine and token selection in code for single threads, for any NVIDIA GPU, and its language."""
