"""What all kernels in Pallas Mosaic GPU share: groups of rows cut into tiles, tracing, launching and interpreting."""
