"""Ways into other libraries. Each module here needs its library installed; `import gqa_attn` needs none of them."""
