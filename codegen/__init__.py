"""TileLang kernels, lowered ahead of time: `python -m codegen` writes csrc/generated. Needs tilelang, no GPU."""
