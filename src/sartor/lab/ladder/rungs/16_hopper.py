"""rung
number = "16"
title = "Hopper: TMA and wgmma"
idea = '''A producer warp keeps tiles coming by TMA, two or three warpgroups multiply them by asynchronous wgmma, so
that copies, products and softmax run at the same time. This is the product kernel, `sartor.attention(...,
kernel="hopper")`.'''
source = "FlashAttention-3 (Shah et al. 2024)"
claim = "up to 740 TFLOP/s in float16 on an H100"
arch = 90
dtypes = ["float16", "bfloat16"]
dims = [64, 128]
causal = true
before = "12"
expect = '''About twice what mma.sync can reach on this architecture: its tensor cores run at full rate under wgmma
only.'''
kernel = "hopper"
"""

import sartor


def run(q, k, v, causal, softmax_scale):
    """out (batch, heads, n, dim)."""
    return sartor.attention(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bhsd", kernel="hopper")
