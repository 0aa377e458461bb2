"""TileLang kernels: one module per family, each with `build(spec)` from a row of the table to a prim_func."""
