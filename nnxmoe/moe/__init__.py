"""Mixture of experts: routers, dispatches, experts and grouped matrix products."""
