"""Thin, optional adapters: each imports its framework, and nothing else of hetstream imports them."""
