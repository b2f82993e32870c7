"""rung
number = "08"
title = "float32 accuracy on tensor cores"
idea = '''Each float32 operand is split into two 16-bit numbers, and a product of float32 accuracy is made of three
products of 16 bits on the tensor cores. This is the product kernel, `sartor.attention(..., kernel="fp32")`.'''
source = "Ootomo and Yokota 2022 for the split; FlashAttention-3 (Shah et al. 2024) for the shape of the kernel"
claim = "none for attention; a third of the 16-bit rate is what three products leave"
arch = 80
dtypes = ["float32"]
dims = [32, 64, 128]
causal = true
before = "06"
expect = '''Faster than any kernel on the float32 units can be: three times cuBLAS's plain float32 product, at
PyTorch's error or less.'''
kernel = "fp32"
"""

import sartor


def run(q, k, v, causal, softmax_scale):
    """out (batch, heads, n, dim). One key is no product: the library gives its value as it is."""
    kernel = "fp32" if k.shape[2] > 1 else "auto"
    return sartor.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bhsd", kernel=kernel)
