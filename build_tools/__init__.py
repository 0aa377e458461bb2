"""How the compiled part is built: what it needs (toolchain.py), then codegen, compilers and linker (native.py).

setup.py calls native.build.
"""
