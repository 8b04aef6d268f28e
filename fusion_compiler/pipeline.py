"""The passes over captured graphs, in the order in which they run.

`compile(..., disable=("fused attention",))` leaves a pass out, `fusion-compiler passes` prints this list, and
FUSION_DEBUG=4 shows a graph after each pass that changed it.
"""

from __future__ import annotations

from collections.abc import Collection

from fusion_compiler.ir.graph_pass import Level, Pass
from fusion_compiler.passes.chunks.chunk import CHUNKED_LOSS
from fusion_compiler.passes.chunks.gradients import CHUNKED_GRADIENT
from fusion_compiler.passes.fuse.choice import PRODUCTS
from fusion_compiler.passes.nests.attention import GENERAL_ATTENTION
from fusion_compiler.passes.nests.sinks import ATTENTION_SINKS
from fusion_compiler.passes.rewrites.affine_lookups import AFFINE_LOOKUPS
from fusion_compiler.passes.rewrites.attention_mask import ATTENTION_MASK
from fusion_compiler.passes.rewrites.attention_operands import (
    CONTIGUOUS_OPERANDS,
    OPERANDS_IN_PLACE,
    SCALED_SCORES,
)
from fusion_compiler.passes.rewrites.contiguous import CONTIGUOUS_ACTIVATIONS
from fusion_compiler.passes.rewrites.convolution_relu import CONVOLUTION_RELU
from fusion_compiler.passes.rewrites.dropped_rows import DROPPED_ROWS
from fusion_compiler.passes.rewrites.embedding_bags import EMBEDDING_BAGS
from fusion_compiler.passes.rewrites.experts import EXPERT_PRODUCTS
from fusion_compiler.passes.rewrites.few_queries import DECODE_ATTENTION
from fusion_compiler.passes.rewrites.grouped_query import GROUPED_QUERIES
from fusion_compiler.passes.rewrites.in_place import IN_PLACE_WRITES
from fusion_compiler.passes.rewrites.innermost_channels import CHANNELS_LAST
from fusion_compiler.passes.rewrites.literals import SCALAR_CONSTANTS
from fusion_compiler.passes.rewrites.masked_attention import MASKED_ATTENTION
from fusion_compiler.passes.rewrites.patches import PATCHES
from fusion_compiler.passes.rewrites.permuted_rows import PERMUTED_ROWS
from fusion_compiler.passes.rewrites.pools import GLOBAL_AVERAGE_POOL, MAX_POOL
from fusion_compiler.passes.rewrites.row_ranges import PLANS_FOR_RANGES
from fusion_compiler.passes.rewrites.scaled_rows import SCALED_ROWS
from fusion_compiler.passes.rewrites.sums_of_products import SUMS_OF_PRODUCTS
from fusion_compiler.passes.rewrites.vocabulary import PADDED_FEATURES
from fusion_compiler.passes.rewrites.written_attention import FUSED_ATTENTION

PASSES: tuple[Pass, ...] = (
    PLANS_FOR_RANGES,  # first: later passes may ask for the range
    ATTENTION_SINKS,
    FUSED_ATTENTION,  # before the passes over calls of attention
    ATTENTION_MASK,  # without a mask tensor, grouped queries reach the flash kernel
    GROUPED_QUERIES,
    SCALED_SCORES,
    OPERANDS_IN_PLACE,
    DECODE_ATTENTION,
    MASKED_ATTENTION,  # what no kernel for few queries takes
    CONTIGUOUS_OPERANDS,
    EXPERT_PRODUCTS,
    EMBEDDING_BAGS,
    AFFINE_LOOKUPS,
    PERMUTED_ROWS,
    SCALED_ROWS,
    DROPPED_ROWS,  # before padded features, which put a slice behind their product
    PATCHES,
    SUMS_OF_PRODUCTS,
    GLOBAL_AVERAGE_POOL,  # before channels are put last
    CHANNELS_LAST,
    CONVOLUTION_RELU,  # takes convolutions with channels last
    PADDED_FEATURES,
    CONTIGUOUS_ACTIVATIONS,
    MAX_POOL,
    SCALAR_CONSTANTS,
    GENERAL_ATTENTION,
    CHUNKED_LOSS,
    CHUNKED_GRADIENT,
    IN_PLACE_WRITES,
    PRODUCTS,
)
NAMES = tuple(each.name for each in PASSES)


def passes_at(level: Level, numerics: str = "float32", disabled: Collection[str] = ()) -> tuple[Pass, ...]:
    """Return the passes of a level that run with these `numerics`, in order, but the disabled ones."""
    allowed = (each for each in PASSES if numerics != "eager" or each.rounds_as_eager)
    enabled = [each for each in allowed if each.name not in disabled]
    names = {"", *(each.name for each in enabled)}
    chosen = (each if each.needs in names else each.otherwise for each in enabled if each.level is level)
    return tuple(each for each in chosen if each is not None)
