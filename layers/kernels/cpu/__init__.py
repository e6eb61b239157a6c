"""The operations compiled for float32 on the CPU with numba; each equals its plain torch function.

Every output row is computed by itself, in an order that does not depend on the other rows, unless a function says
otherwise. Reductions may be reassociated by the compiler (for vector instructions), always in the same way.

numba keeps compiled code beside these files and looks only at the file of a kernel itself: after a change to a function
that kernels of other files call, remove ``__pycache__/*.nb*``.
"""
