"""Matching a sequence's newest tokens with what it held before."""

from penstock.kernels.ngram.reference import ngram_drafts

__all__ = ["ngram_drafts"]
