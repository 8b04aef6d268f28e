"""Rewrites above autograd: ATen graph -> (ATen graph, notes), in this order."""

from fusion_compiler.passes.rewrites.attention_mask import simplify_masks
from fusion_compiler.passes.rewrites.record import Notes, Rewrite, RewriteNote

DEFAULT_REWRITES: tuple[Rewrite, ...] = (simplify_masks,)

__all__ = ["DEFAULT_REWRITES", "Notes", "Rewrite", "RewriteNote", "simplify_masks"]
