"""Serving one live server: its lists, its clients, who may watch what."""
