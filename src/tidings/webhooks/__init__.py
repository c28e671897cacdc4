"""Delivery to URLs."""
