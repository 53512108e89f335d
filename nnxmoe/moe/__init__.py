"""Mixture of experts: router, dispatch, experts, combine."""
