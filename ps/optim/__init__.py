"""Update rules: formulas, the kernels generated from them, clipping."""
