"""Rewrites above autograd: ATen graph -> (ATen graph, notes), in this order.

Left out: sibling projections (Q, K and V; gate and up) as one product. In a layer of the
Llama-1B shape at 8192 tokens, concatenating the weights moves 25 MB and the gradients 100 MB a
step (29 us at 4.28 TB/s); what it saves is 67 MB of partial sums of the input's gradient (16 us).
"""

from fusion_compiler.ir.rewrite_note import Notes, Rewrite, RewriteNote
from fusion_compiler.passes.rewrites.affine_lookups import slice_lookups
from fusion_compiler.passes.rewrites.attention_mask import simplify_masks
from fusion_compiler.passes.rewrites.attention_operands import lay_by_rows, read_in_place, scale_scores
from fusion_compiler.passes.rewrites.contiguous import order_rows
from fusion_compiler.passes.rewrites.convolution_relu import end_convolutions
from fusion_compiler.passes.rewrites.dropped_rows import drop_rows
from fusion_compiler.passes.rewrites.embedding_bags import sum_bags
from fusion_compiler.passes.rewrites.experts import choose_matrices
from fusion_compiler.passes.rewrites.few_queries import stream_keys
from fusion_compiler.passes.rewrites.grouped_query import group_queries
from fusion_compiler.passes.rewrites.innermost_channels import turn_channels
from fusion_compiler.passes.rewrites.literals import number_literals
from fusion_compiler.passes.rewrites.maxima import compare_windows
from fusion_compiler.passes.rewrites.patches import multiply_patches
from fusion_compiler.passes.rewrites.permuted_rows import permute_rows
from fusion_compiler.passes.rewrites.row_ranges import keep_to_ranges
from fusion_compiler.passes.rewrites.scaled_rows import scale_rows
from fusion_compiler.passes.rewrites.sums_of_products import multiply_sums
from fusion_compiler.passes.rewrites.vocabulary import align_features
from fusion_compiler.passes.rewrites.whole_pool import average_whole
from fusion_compiler.passes.rewrites.written_attention import call_attention

# Rows are kept to a range first: what follows may ask for it. Attention next, whose masks are then proved;
# then masks: without a mask tensor, grouped queries reach the flash kernel. Rows are dropped before products
# are padded, which puts a slice of its own behind them. Pooling is a mean before channels are put last.
DEFAULT_REWRITES: tuple[Rewrite, ...] = (
    keep_to_ranges,
    call_attention,
    simplify_masks,
    group_queries,
    scale_scores,
    read_in_place,
    stream_keys,
    lay_by_rows,
    choose_matrices,
    sum_bags,
    slice_lookups,
    permute_rows,
    scale_rows,
    drop_rows,
    multiply_patches,
    multiply_sums,
    average_whole,
    turn_channels,
    end_convolutions,
    align_features,
    order_rows,
    compare_windows,
    number_literals,
)

_ROUNDED_ELSEWHERE = (
    keep_to_ranges,
    call_attention,
    scale_scores,
    lay_by_rows,
    stream_keys,
    choose_matrices,
    scale_rows,
    multiply_sums,
    end_convolutions,
)


def rewrites_for(numerics: str) -> tuple[Rewrite, ...]:
    """Those that `numerics` allows: a fused attention rounds at other places than eager, which may multiply
    in float32 and rounds what is multiplied by a number before its scores; a row's factor is rounded with the
    operand, not the product; a convolution with ReLU does not round before that; and what adds up in another
    order than a library is no product."""
    return tuple(r for r in DEFAULT_REWRITES if numerics != "eager" or r not in _ROUNDED_ELSEWHERE)


__all__ = [
    "DEFAULT_REWRITES",
    "Notes",
    "Rewrite",
    "RewriteNote",
    "align_features",
    "average_whole",
    "call_attention",
    "choose_matrices",
    "compare_windows",
    "drop_rows",
    "end_convolutions",
    "group_queries",
    "keep_to_ranges",
    "lay_by_rows",
    "multiply_patches",
    "multiply_sums",
    "number_literals",
    "order_rows",
    "permute_rows",
    "read_in_place",
    "rewrites_for",
    "scale_rows",
    "scale_scores",
    "simplify_masks",
    "slice_lookups",
    "stream_keys",
    "sum_bags",
    "turn_channels",
]
