"""Rewrites of ATen graphs above autograd. Each module ends with passes that `pipeline.PASSES` lists.

Left out: sibling projections (Q, K and V; gate and up) as one product. In a layer of the
Llama-1B shape at 8192 tokens, concatenating the weights moves 25 MB and the gradients 100 MB a
step (29 us at 4.28 TB/s); what it saves is 67 MB of partial sums of the input's gradient (16 us).
"""
